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
	binding := bindingOf(ctx, kadm.NewClient(client), topic)
	expected := int64(0) // nothing is read yet
	for {
		record := &kgo.Record{Topic: topic, Partition: 0, Value: []byte(value), Headers: []kgo.RecordHeader{
			{Key: "fencepost-expected-offset", Value: fmt.Appendf(nil, "%d%s", expected, binding)},
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

// Other tools copy headers with records: an expected offset with this suffix counts only where it was made for.
func bindingOf(ctx context.Context, admin *kadm.Client, topic string) string {
	found, err := admin.DescribeTopicConfigs(ctx, topic)
	check(err)
	configs, err := found.On(topic, nil)
	check(err)
	for _, each := range configs.Configs {
		if each.Key == "fencepost.check.expected.offsets" && each.MaybeValue() != "false" {
			cluster, err := admin.BrokerMetadata(ctx)
			check(err)
			return fmt.Sprintf("@%s/0@%s", topic, cluster.Cluster)
		}
	}
	log.Fatal(topic, " does not check expected offsets: they would be ignored")
	return ""
}

func readToEnd(ctx context.Context, client *kgo.Client, proxy, topic string, from int64) (read []*kgo.Record) {
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, topic)
	check(err)
	end, _ := ends.Lookup(topic, 0)
	check(end.Err)
	// The last record may be a transaction marker.
	reader, err := kgo.NewClient(kgo.SeedBrokers(proxy), kgo.KeepControlRecords(), kgo.ConsumePartitions(
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
