// Appends one record at the end of partition 0. Arguments: proxy, topic, value.
//
//	go mod init append && go mod tidy && go run . 127.0.0.1:19092 orders one
package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/IBM/sarama"
)

func main() {
	topic, writeID := os.Args[2], []byte(rand.Text())
	config := sarama.NewConfig()
	config.Version = sarama.V2_8_0_0
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Partitioner = sarama.NewManualPartitioner
	client, err := sarama.NewClient([]string{os.Args[1]}, config)
	check(err)
	defer client.Close()
	producer, err := sarama.NewSyncProducerFromClient(client)
	check(err)
	requireCheck(client, topic)
	expected := int64(0) // nothing is read yet
	for {
		_, offset, err := producer.SendMessage(&sarama.ProducerMessage{
			Topic: topic, Partition: 0, Value: sarama.StringEncoder(os.Args[3]), Headers: []sarama.RecordHeader{
				// Other tools copy headers with records: with topic and partition, it counts only there.
				{Key: []byte("fencepost-expected-offset"), Value: fmt.Appendf(nil, "%d@%s/0", expected, topic)},
				{Key: []byte("fencepost-write-id"), Value: writeID},
			},
		})
		if err == nil {
			fmt.Println("appended at", offset)
			return
		}
		if !errors.Is(err, sarama.ErrPolicyViolation) {
			log.Fatal(err) // the outcome is unknown, or a retry does not help
		}
		fmt.Println("refused: expected", expected)
		// Read what others have appended, then decide again. This also shows whether an earlier attempt succeeded.
		var batches []*sarama.RecordBatch
		batches, expected = readToEnd(client, topic, expected)
		for _, batch := range batches {
			for _, record := range batch.Records {
				for _, header := range record.Headers {
					if string(header.Key) == "fencepost-write-id" && bytes.Equal(header.Value, writeID) {
						fmt.Println("appended at", batch.FirstOffset+record.OffsetDelta)
						return
					}
				}
			}
		}
	}
}

func requireCheck(client sarama.Client, topic string) {
	admin, err := sarama.NewClusterAdminFromClient(client)
	check(err)
	configs, err := admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: topic})
	check(err)
	for _, each := range configs {
		if each.Name == "fencepost.check.expected.offsets" && each.Value != "false" {
			return
		}
	}
	log.Fatal(topic, " does not check expected offsets: they would be ignored")
}

// Fetches batches, not messages: the last record may be a transaction marker, which is no message.
func readToEnd(client sarama.Client, topic string, from int64) (read []*sarama.RecordBatch, end int64) {
	end, err := client.GetOffset(topic, 0, sarama.OffsetNewest)
	check(err)
	for next := from; next < end; {
		leader, err := client.Leader(topic, 0)
		check(err)
		fetch := &sarama.FetchRequest{Version: 4, MaxWaitTime: 500, MinBytes: 1, MaxBytes: 1 << 24}
		fetch.AddBlock(topic, 0, next, 1<<20, -1)
		response, err := leader.Fetch(fetch)
		check(err)
		block := response.GetBlock(topic, 0)
		if block.Err != sarama.ErrNoError {
			log.Fatal(block.Err)
		}
		for _, set := range block.RecordsSet {
			if !set.RecordBatch.PartialTrailingRecord {
				read = append(read, set.RecordBatch)
				next = set.RecordBatch.LastOffset() + 1
			}
		}
	}
	return read, end
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
