// Loads the lines KEY TAB VALUE of a file, each once and in order, as one of the loaders of docs/recipes/loader.md, which
// has the format. A line is a unit, its number the position. Arguments: proxy, topic, name of the load, file. After any
// error, run it again: it continues where the log ends.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Progress is what this program reads of the header fencepost-load.
type Progress struct {
	Load                       string
	Unit, Complete, Partitions int
}

var (
	ctx, proxy, topic = context.Background(), os.Args[1], os.Args[2]
	// With manual flushing, the records of an append are one batch: it is refused completely or not at all.
	client   = must(kgo.NewClient(kgo.SeedBrokers(proxy), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ManualFlushing()))
	admin    = kadm.NewClient(client)
	cluster  = must(admin.Metadata(ctx, topic)).Cluster
	lines    = strings.Split(strings.TrimSuffix(string(must(os.ReadFile(os.Args[4]))), "\n"), "\n")
	run      = rand.Text()
	ends     []int64 // of each partition: where it was read to
	complete int     // so many units are in all partitions
)

func main() {
	units, hash := find(), kgo.StickyKeyPartitioner(nil).ForTopic(topic)
	for group := complete; complete < len(lines); complete = group {
		waiting := make([][]int, len(ends))
		for bytes := 0; group < len(lines) && bytes < 500_000; bytes += len(lines[group-1]) + 500 { // with headers
			group++
			if p := hash.Partition(record(group), len(ends)); group > units[p] {
				waiting[p] = append(waiting[p], group)
			}
		}
		for p := range waiting {
			appendAll(p, waiting[p])
		}
	}
}

// Reads each partition to its end. Returns the last unit of each.
func find() []int {
	if !slices.ContainsFunc(must(must(admin.DescribeTopicConfigs(ctx, topic)).On(topic, nil)).Configs, func(each kadm.Config) bool {
		return each.Key == "fencepost.check.expected.offsets" && each.MaybeValue() == "required"
	}) {
		log.Fatal(topic, " does not require expected offsets: they could be ignored")
	}
	starts, stable := must(admin.ListStartOffsets(ctx, topic)), must(admin.ListCommittedOffsets(ctx, topic))
	check(errors.Join(starts.Error(), stable.Error()))
	ends = make([]int64, len(starts[topic]))
	units, known, deleted, expanded := make([]int, len(ends)), false, false, false
	for p := range units {
		start, end := starts[topic][int32(p)].Offset, stable[topic][int32(p)].Offset
		found := read(p, max(start, end-1000), end)
		for count := int64(1000); found == nil && end-count > start; count *= 100 {
			found = read(p, max(start, end-100*count), end)
		}
		deleted = deleted || start > 0
		if found != nil {
			units[p], complete = found.Unit, max(complete, found.Complete)
			known, expanded = true, expanded || found.Partitions != len(ends)
		}
	}
	if expanded || deleted && !known {
		log.Fatal("expanded topic (continue with the Python library), or deleted records: did the load run?")
	}
	return units
}

func record(unit int) *kgo.Record {
	key, value, _ := strings.Cut(lines[unit-1], "\t")
	position := strings.TrimPrefix(fmt.Sprint(complete), "0")
	progress := map[string]any{"load": os.Args[3], "run": run, "unit": unit, "rows": 1, "at": fmt.Append(nil, unit),
		"complete": complete, "position": []byte(position), "partitions": len(ends)} // bytes become base64
	return &kgo.Record{Topic: topic, Key: []byte(key), Value: []byte(value),
		Headers: []kgo.RecordHeader{{Key: "fencepost-load", Value: must(json.Marshal(progress))}}}
}

// Appends after records of other writers. The program ends if another loader runs, or the outcome is unknown.
func appendAll(p int, units []int) {
	writeID, outcomes := []byte(rand.Text()), []error{}
	for i, unit := range units {
		each := record(unit)
		each.Partition = int32(p)
		each.Headers = append(each.Headers, kgo.RecordHeader{Key: "fencepost-write-id", Value: writeID}, kgo.RecordHeader{
			Key: "fencepost-expected-offset", Value: fmt.Appendf(nil, "%d@%s/%d@%s", ends[p]+int64(i), topic, p, cluster)})
		client.Produce(ctx, each, func(_ *kgo.Record, err error) { outcomes = append(outcomes, err) })
	}
	check(client.Flush(ctx))
	if err := errors.Join(outcomes...); err == nil {
		ends[p] += int64(len(units))
		return
	} else if !isRefusal(err) {
		log.Fatal("the outcome is unknown: ", err)
	}
	end := must(admin.ListCommittedOffsets(ctx, topic))[topic][int32(p)]
	if check(end.Err); end.Offset <= ends[p] || read(p, ends[p], end.Offset) != nil {
		log.Fatal("another loader runs, or the topic was replaced")
	}
	appendAll(p, units)
}

// Its message has the log end, OFFSET_MISMATCH … actual=57, but franz-go drops it.
func isRefusal(err error) bool { return errors.Is(err, kerr.PolicyViolation) }

// The newest progress of the load from an offset to the end, or nil. The last record may be a transaction marker.
func read(p int, from, end int64) (newest *Progress) {
	reader := must(kgo.NewClient(kgo.SeedBrokers(proxy), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords(),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {int32(p): kgo.NoResetOffset().At(from)}})))
	defer reader.Close()
	for ends[p] = from; ends[p] < end; {
		fetched := reader.PollFetches(ctx)
		check(fetched.Err())
		for _, each := range fetched.Records() {
			ends[p] = each.Offset + 1
			for _, header := range each.Headers {
				found := Progress{}
				if header.Key == "fencepost-load" && json.Unmarshal(header.Value, &found) == nil && found.Load == os.Args[3] {
					newest = &found
				}
			}
		}
	}
	return newest
}

func must[T any](result T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return result
}

func check(err error) { must(0, err) }
