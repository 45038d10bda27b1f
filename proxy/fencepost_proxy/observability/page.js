"use strict";
(() => {
  const lost = document.getElementById("lost"), pause = document.getElementById("pause");
  const url = new URL(location.href), shown = {};
  url.searchParams.set("live", "1");
  let paused = false, answered = new Date();
  const refresh = async () => {
    if (paused || document.hidden) return;
    try {
      const answer = await fetch(url, {cache: "no-store", signal: AbortSignal.timeout(20000)});
      if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
      const page = await answer.json();
      for (const [id, html] of Object.entries(page.sections)) {
        const there = document.getElementById(id);
        if (!there || shown[id] === html) continue;
        const at = there.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        there.innerHTML = shown[id] = html;
        if (at) there.querySelector(`a[href="${CSS.escape(at)}"]`)?.focus();
      }
      document.title = page.title;
      answered = new Date();
      lost.hidden = true;
    } catch (error) {
      document.title = "No response \u2013 Fencepost";
      lost.textContent = `No response from the proxy since ${answered.toLocaleTimeString()}: this page is out of date. `
        + `Is the proxy still running? (${error.message})`;
      lost.hidden = false;
    }
  };
  const again = async () => { await refresh(); setTimeout(again, REFRESH_SECONDS * 1000); };
  setTimeout(again, REFRESH_SECONDS * 1000);
  document.addEventListener("visibilitychange", refresh);
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    refresh();
  });
})();
