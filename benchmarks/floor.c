/* A minimal relay: splices bytes from socket to pipe to socket without reading them. A lower bound for any proxy.
 *
 *   floor LISTEN_HOST:PORT UPSTREAM_HOST:PORT [CONGESTION_CONTROL]
 *
 * One thread, epoll, a pipe of 1 MiB for each direction. IPv4. For measurements only. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PIPE_BYTES = 1 << 20, EVENTS = 64 };

struct side {
    int fd, pipe[2];
    size_t filled; /* bytes in the pipe, on the way to `other` */
    struct side *other;
};

static int poller;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static struct sockaddr_in address(const char *text) {
    struct sockaddr_in found = {.sin_family = AF_INET};
    char host[64];
    unsigned port;
    if (sscanf(text, "%63[^:]:%u", host, &port) != 2 || !inet_aton(host, &found.sin_addr)) die(text);
    found.sin_port = htons(port);
    return found;
}

/* Read a side while its pipe is empty. Write to it while the pipe of the other side has bytes. */
static void watch(struct side *s, int how) {
    struct epoll_event event = {.data.ptr = s};
    event.events = (s->filled ? 0 : EPOLLIN) | (s->other->filled ? EPOLLOUT : 0);
    epoll_ctl(poller, how, s->fd, &event);
}

static void end(struct side *s) {
    for (int each = 0; each < 2; each++, s = s->other) {
        close(s->fd), close(s->pipe[0]), close(s->pipe[1]);
        s->fd = -1; /* not freed: this epoll_wait may have returned another event for it */
    }
}

/* Returns -1 if the connection ended. */
static int pass_on(struct side *s) {
    size_t before = s->filled;
    while (s->filled) {
        ssize_t n = splice(s->pipe[0], 0, s->other->fd, 0, s->filled, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) return -1;
        s->filled -= n;
    }
    return before ? 0 : -1;
}

static void ready(struct side *s, unsigned events) {
    if (s->fd < 0) return;
    if (events & EPOLLOUT && s->other->filled) {
        if (pass_on(s->other)) return end(s);
        if (!s->other->filled) watch(s, EPOLL_CTL_MOD), watch(s->other, EPOLL_CTL_MOD);
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)) || s->filled) return;
    ssize_t n = splice(s->fd, 0, s->pipe[1], 0, PIPE_BYTES, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return end(s);
    s->filled = n;
    if (pass_on(s)) return end(s);
    if (s->filled) watch(s, EPOLL_CTL_MOD), watch(s->other, EPOLL_CTL_MOD);
}

int main(int count, char **words) {
    if (count < 3) return fprintf(stderr, "usage: floor HOST:PORT UPSTREAM_HOST:PORT [CONGESTION_CONTROL]\n"), 2;
    struct sockaddr_in here = address(words[1]), upstream = address(words[2]);
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    signal(SIGPIPE, SIG_IGN);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (void *)&here, sizeof here) || listen(listener, 128)) die(words[1]);
    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN}, events[EVENTS];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int found = epoll_wait(poller, events, EVENTS, -1);
        for (int each = 0; each < found; each++) {
            if (events[each].data.ptr) {
                ready(events[each].data.ptr, events[each].events);
                continue;
            }
            struct side *sides = calloc(2, sizeof *sides);
            sides[0].fd = accept(listener, 0, 0), sides[1].fd = socket(AF_INET, SOCK_STREAM, 0);
            if (sides[0].fd < 0 || connect(sides[1].fd, (void *)&upstream, sizeof upstream)) {
                close(sides[0].fd), close(sides[1].fd), free(sides);
                continue;
            }
            for (int k = 0; k < 2; k++) {
                struct side *s = &sides[k];
                s->other = &sides[1 - k];
                if (pipe2(s->pipe, O_NONBLOCK)) die("pipe");
                fcntl(s->pipe[1], F_SETPIPE_SZ, PIPE_BYTES);
                fcntl(s->fd, F_SETFL, O_NONBLOCK);
                setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                if (count > 3 && setsockopt(s->fd, IPPROTO_TCP, TCP_CONGESTION, words[3], strlen(words[3]))) die(words[3]);
                watch(s, EPOLL_CTL_ADD);
            }
        }
    }
}
