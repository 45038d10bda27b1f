// Appends one record at the end of partition 0. Arguments: proxy, topic, value.
//
//	go mod init append && go mod tidy && go run . 127.0.0.1:19092 orders one
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	ctx, proxy, topic, value := context.Background(), os.Args[1], os.Args[2], os.Args[3]
	writeID := []byte(rand.Text())
	client, err := kgo.NewClient(kgo.SeedBrokers(proxy), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	check(err)
	defer client.Close()
	expected := int64(0) // nothing is read yet
	for {
		record := &kgo.Record{Topic: topic, Partition: 0, Value: []byte(value), Headers: []kgo.RecordHeader{
			{Key: "fencepost-expected-offset", Value: strconv.AppendInt(nil, expected, 10)},
			{Key: "fencepost-write-id", Value: writeID},
		}}
		err := client.ProduceSync(ctx, record).FirstErr()
		if err == nil {
			fmt.Println("appended at", record.Offset)
			return
		}
		if !errors.Is(err, kerr.PolicyViolation) {
			log.Fatal(err) // the outcome is unknown, or a retry does not help
		}
		fmt.Println("refused: expected", expected)
		// Read what others have appended, then decide again. This also shows whether an earlier attempt succeeded.
		for _, each := range readToEnd(ctx, client, proxy, topic, expected) {
			for _, header := range each.Headers {
				if header.Key == "fencepost-write-id" && bytes.Equal(header.Value, writeID) {
					fmt.Println("appended at", each.Offset)
					return
				}
			}
			expected = each.Offset + 1
		}
	}
}

func readToEnd(ctx context.Context, client *kgo.Client, proxy, topic string, from int64) (read []*kgo.Record) {
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, topic)
	check(err)
	end, _ := ends.Lookup(topic, 0)
	check(end.Err)
	reader, err := kgo.NewClient(kgo.SeedBrokers(proxy), kgo.ConsumePartitions(
		map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(from)}}))
	check(err)
	defer reader.Close()
	for next := from; next < end.Offset; next = read[len(read)-1].Offset + 1 {
		fetched := reader.PollFetches(ctx)
		check(fetched.Err())
		read = append(read, fetched.Records()...)
	}
	return read
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
