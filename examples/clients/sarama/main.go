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
		for _, each := range readToEnd(client, topic, expected) {
			for _, header := range each.Headers {
				if string(header.Key) == "fencepost-write-id" && bytes.Equal(header.Value, writeID) {
					fmt.Println("appended at", each.Offset)
					return
				}
			}
			expected = each.Offset + 1
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

func readToEnd(client sarama.Client, topic string, from int64) (read []*sarama.ConsumerMessage) {
	end, err := client.GetOffset(topic, 0, sarama.OffsetNewest)
	check(err)
	consumer, err := sarama.NewConsumerFromClient(client)
	check(err)
	reader, err := consumer.ConsumePartition(topic, 0, from)
	check(err)
	defer reader.Close()
	for next := from; next < end; next = read[len(read)-1].Offset + 1 {
		read = append(read, <-reader.Messages())
	}
	return read
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
