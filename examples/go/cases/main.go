// Runs cases of the contract against a proxy. contract/schema.json describes them.
//
//	go run ./cases 127.0.0.1:19092 ../../contract/cases/*.json
//
// Kafka has one broker. Cases that need more than a proxy and a client are left out, and counted.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Case fails by a panic that says what differs.
type Case struct {
	Name   string
	Needs  []string
	Topics []struct {
		Name       string
		Partitions int32
		Configs    map[string]*string
	}
	Steps []struct {
		Produce       []Request
		DeletedBefore int64 `json:"delete_records_before"`
	}
	Logs []struct {
		Topic     string
		Partition int32
		Records   [][2]any // offset and value
	}
	connections map[string]net.Conn
	producers   map[string]int64
	batches     map[string][]byte
	started     time.Time
}

type Request struct {
	Connection    string
	Version, Acks int16
	Timeout       int32   `json:"timeout_ms"`
	Transaction   *string `json:"transactional_id"`
	Field253      []byte  `json:"field_253"`
	Field254      []byte  `json:"field_254"`
	Closes        bool
	Partitions    []struct {
		Topic     string
		Partition int32
		Batch     json.RawMessage
		Answer    Answer
	}
}

type Answer struct {
	Code       int16
	BaseOffset int64  `json:"base_offset"`
	LogStart   *int64 `json:"log_start_offset"`
	Message    *string
}

var (
	address, clientID = os.Args[1], "cases"
	ctx, _            = context.WithTimeout(context.Background(), 5*time.Minute)
	soon              = kgo.MetadataMinAge(10 * time.Millisecond) // topics are new
	client, _         = kgo.NewClient(kgo.SeedBrokers(address), soon)
	admin             = kadm.NewClient(client)
)

func main() {
	var cases []*Case
	passed, failed, leftOut := 0, 0, map[string]int{}
	for _, file := range os.Args[2:] {
		var read []*Case
		text, err := os.ReadFile(file)
		check(err)
		check(json.Unmarshal(text, &read))
		for _, each := range read {
			if len(each.Needs) > 0 {
				leftOut[strings.Join(each.Needs, ", ")]++
			} else {
				cases = append(cases, each)
			}
		}
	}
	createTopics(cases)
	for _, each := range cases {
		if failure := each.run(); failure != nil {
			failed++
			fmt.Println(each.Name+":", failure)
		} else {
			passed++
		}
	}
	result, _ := json.Marshal(map[string]any{"passed": passed, "failed": failed, "left out": leftOut})
	fmt.Println(string(result))
	os.Exit(min(failed, 1))
}

func (c *Case) run() (failure any) {
	c.connections, c.producers, c.batches, c.started = map[string]net.Conn{}, map[string]int64{}, map[string][]byte{}, time.Now()
	defer func() {
		failure = recover()
		for _, each := range c.connections {
			each.Close()
		}
	}()
	for _, step := range c.Steps {
		if step.Produce != nil {
			c.produce(step.Produce)
		} else {
			_, err := admin.DeleteRecords(ctx, kadm.Offsets{c.Topics[0].Name: {0: {Topic: c.Topics[0].Name, At: step.DeletedBefore}}})
			check(err)
		}
	}
	for _, log := range c.Logs {
		if read := readLog(log.Topic, log.Partition); !slices.Equal(read, log.Records) {
			panic(fmt.Sprintf("%s-%d: log %v, expected %v", log.Topic, log.Partition, read, log.Records))
		}
	}
	return
}

// In one request: the proxy acknowledges a check once every proxy knows it, which takes seconds.
func createTopics(cases []*Case) {
	request, names := kmsg.NewPtrCreateTopicsRequest(), []string{}
	for _, each := range cases {
		for _, topic := range each.Topics {
			made := kmsg.CreateTopicsRequestTopic{Topic: topic.Name, NumPartitions: topic.Partitions, ReplicationFactor: 1}
			for name, value := range topic.Configs {
				made.Configs = append(made.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: name, Value: value})
			}
			request.Topics, names = append(request.Topics, made), append(names, topic.Name)
		}
	}
	deleted, err := admin.DeleteTopics(ctx, names...) // of an earlier run
	check(err)
	for _, each := range deleted {
		if each.Err != nil && !errors.Is(each.Err, kerr.UnknownTopicOrPartition) {
			panic(each.Err)
		}
	}
	response, err := request.RequestWith(ctx, client)
	check(err)
	for _, each := range response.Topics {
		check(kerr.ErrorForCode(each.ErrorCode))
	}
	for ready := false; !ready; { // each partition has a leader
		ends, err := admin.ListEndOffsets(ctx, names...)
		ready = err == nil && ends.Error() == nil
		check(ctx.Err())
	}
}

func (c *Case) produce(requests []Request) {
	name := requests[0].Connection
	connection := c.connections[name]
	if connection == nil {
		var err error
		connection, err = net.Dial("tcp", address)
		check(err)
		c.connections[name] = connection
	}
	check(connection.SetDeadline(time.Now().Add(time.Minute)))
	var frames []byte
	for _, each := range requests {
		frames = append(frames, c.frame(each)...)
	}
	_, err := connection.Write(frames)
	check(err)
	for _, each := range requests {
		size := make([]byte, 4)
		if each.Closes {
			if _, err := connection.Read(size); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				panic("the connection stays open")
			}
			delete(c.connections, name)
		} else if each.Acks != 0 {
			_, err := io.ReadFull(connection, size)
			check(err)
			body := make([]byte, binary.BigEndian.Uint32(size))
			_, err = io.ReadFull(connection, body)
			check(err)
			response := kmsg.NewPtrProduceResponse()
			response.Version = each.Version
			if body = body[4:]; response.IsFlexible() {
				body = body[1:] // the header's tagged fields
			}
			check(response.ReadFrom(body))
			for _, part := range each.Partitions {
				part.Answer.compare(answerOf(response, part.Topic, part.Partition))
			}
		}
	}
}

func answerOf(response *kmsg.ProduceResponse, topic string, partition int32) kmsg.ProduceResponseTopicPartition {
	for _, each := range response.Topics {
		for _, answer := range each.Partitions {
			if each.Topic == topic && answer.Partition == partition {
				return answer
			}
		}
	}
	panic(fmt.Sprintf("no answer for partition %d of %s", partition, topic))
}

func (expected *Answer) compare(got kmsg.ProduceResponseTopicPartition) {
	same := got.ErrorCode == expected.Code && got.BaseOffset == expected.BaseOffset && (got.ErrorMessage == nil) == (expected.Message == nil)
	if expected.LogStart != nil {
		same = same && got.LogStartOffset == *expected.LogStart
	}
	if same && got.ErrorMessage != nil {
		text, more := strings.CutSuffix(*expected.Message, "…")
		same = *got.ErrorMessage == text || more && strings.HasPrefix(*got.ErrorMessage, text)
	}
	if !same {
		text, _ := json.Marshal([]any{expected, got})
		panic("expected, got: " + string(text))
	}
}

func (c *Case) frame(request Request) []byte {
	made := kmsg.NewPtrProduceRequest()
	made.Version, made.Acks, made.TimeoutMillis, made.TransactionID = request.Version, request.Acks, request.Timeout, request.Transaction
	for _, part := range request.Partitions {
		at := slices.IndexFunc(made.Topics, func(topic kmsg.ProduceRequestTopic) bool { return topic.Topic == part.Topic })
		if at < 0 {
			at = len(made.Topics)
			made.Topics = append(made.Topics, kmsg.ProduceRequestTopic{Topic: part.Topic})
			if request.Field253 != nil {
				made.Topics[at].UnknownTags.Set(253, request.Field253)
			}
		}
		made.Topics[at].Partitions = append(made.Topics[at].Partitions,
			kmsg.ProduceRequestTopicPartition{Partition: part.Partition, Records: c.bytesOf(part.Batch)})
	}
	frame := kmsg.NewRequestFormatter(kmsg.FormatterClientID(clientID)).AppendRequest(nil, made, 0)
	if request.Field254 != nil {
		at := 4 + 2 + 2 + 4 + 2 + len(clientID) // the number of tagged fields in the header
		frame = slices.Replace(frame, at, at+1, append([]byte{1, 0xfe, 1, byte(len(request.Field254))}, request.Field254...)...)
		binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
	}
	return frame
}

func (c *Case) bytesOf(text json.RawMessage) []byte {
	if made, found := c.batches[string(text)]; found {
		return made
	}
	var batch struct {
		Bytes    []byte
		Codec    byte
		Producer string
		Age      *int64 `json:"age_ms"`
		Resent   bool
	}
	check(json.Unmarshal(text, &batch))
	made := batch.Bytes
	if batch.Codec > 0 {
		codecs := []kgo.CompressionCodec{kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()}
		compressor, err := kgo.DefaultCompressor(codecs[batch.Codec-1])
		check(err)
		records, _ := compressor.Compress(new(bytes.Buffer), made[61:])
		made = append(made[:61], records...)
		made[22] |= batch.Codec
		binary.BigEndian.PutUint32(made[8:], uint32(len(made)-12))
	}
	if batch.Producer != "" {
		if _, found := c.producers[batch.Producer]; !found {
			response, err := kmsg.NewPtrInitProducerIDRequest().RequestWith(ctx, client)
			check(err)
			c.producers[batch.Producer] = response.ProducerID
		}
		binary.BigEndian.PutUint64(made[43:], uint64(c.producers[batch.Producer]))
	}
	if batch.Age != nil {
		now := time.Now()
		if batch.Resent {
			now = c.started
		}
		binary.BigEndian.PutUint64(made[27:], uint64(now.UnixMilli()-*batch.Age))
		binary.BigEndian.PutUint64(made[35:], uint64(now.UnixMilli()-*batch.Age))
	}
	if batch.Codec > 0 || batch.Producer != "" || batch.Age != nil { // others may have a wrong CRC on purpose
		binary.BigEndian.PutUint32(made[17:], crc32.Checksum(made[21:], crc32.MakeTable(crc32.Castagnoli)))
	}
	c.batches[string(text)] = made
	return made
}

func readLog(topic string, partition int32) (read [][2]any) {
	starts, err := admin.ListStartOffsets(ctx, topic)
	check(err)
	ends, err := admin.ListEndOffsets(ctx, topic)
	check(err)
	start, _ := starts.Lookup(topic, partition)
	end, _ := ends.Lookup(topic, partition)
	if start.Offset == end.Offset {
		return
	}
	reader, err := kgo.NewClient(kgo.SeedBrokers(address), soon, kgo.ConsumePartitions(
		map[string]map[int32]kgo.Offset{topic: {partition: kgo.NewOffset().At(start.Offset)}}))
	check(err)
	defer reader.Close()
	for next := start.Offset; next < end.Offset; {
		fetched := reader.PollFetches(ctx)
		check(fetched.Err())
		for _, each := range fetched.Records() {
			read, next = append(read, [2]any{float64(each.Offset), string(each.Value)}), each.Offset+1
		}
	}
	return
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
