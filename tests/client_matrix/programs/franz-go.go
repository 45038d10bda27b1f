package main

import (
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

func main() {
	given, ctx := given()
	client := func(options ...kgo.Opt) *kgo.Client {
		options = append(options, kgo.SeedBrokers(given.Bootstrap), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		login := scram.Auth{User: given.User, Pass: given.Password}
		switch given.Mechanism {
		case "PLAIN":
			options = append(options, kgo.SASL(plain.Auth{User: given.User, Pass: given.Password}.AsMechanism()))
		case "SCRAM-SHA-256":
			options = append(options, kgo.SASL(login.AsSha256Mechanism()))
		case "SCRAM-SHA-512":
			options = append(options, kgo.SASL(login.AsSha512Mechanism()))
		case "OAUTHBEARER":
			options = append(options, kgo.SASL(oauth.Auth{Token: given.Token}.AsMechanism()))
		}
		if given.Mechanism != "" {
			options = append(options, kgo.DialTLSConfig(given.tls()))
		}
		made, err := kgo.NewClient(options...)
		must(err)
		return made
	}
	record := func(value string, headers ...kgo.RecordHeader) *kgo.Record {
		return &kgo.Record{Topic: given.Topic, Key: []byte("k"), Value: []byte(value), Headers: headers}
	}

	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	for _, codec := range given.Codecs {
		producer := client(kgo.ProducerBatchCompression(codecs[codec]))
		offsets := []int64{}
		for i := 0; i < records; i++ {
			sent, err := producer.ProduceSync(ctx, record(codec, kgo.RecordHeader{Key: "h", Value: []byte("v")})).First()
			must(err)
			offsets = append(offsets, sent.Offset)
		}
		say(codec, offsets)
		producer.Close()
	}

	transactional := client(kgo.TransactionalID(given.Transaction))
	for _, value := range []string{"committed", "aborted"} {
		must(transactional.BeginTransaction())
		sent, err := transactional.ProduceSync(ctx, record(value)).First()
		must(err)
		must(transactional.EndTransaction(ctx, kgo.TransactionEndTry(value == "committed")))
		say(value, sent.Offset)
	}
	transactional.Close()

	if given.Refused {
		producer := client()
		_, err := producer.ProduceSync(ctx, record("x", kgo.RecordHeader{Key: "fencepost-expected-offset", Value: []byte("0")})).First()
		say("refused", err)
		_, err = producer.ProduceSync(ctx, record("x")).First()
		must(err)
		say("after", "appended")
		producer.Close()
	}

	consumer := client(
		kgo.ConsumerGroup(given.Group), kgo.ConsumeTopics(given.Topic), kgo.DisableAutoCommit(),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	read := []string{}
	for len(read) == 0 || read[len(read)-1] != "committed" {
		fetched := consumer.PollFetches(ctx)
		must(ctx.Err())
		for _, each := range fetched.Records() {
			if len(read) == 0 || read[len(read)-1] != "committed" {
				read = append(read, string(each.Value))
			}
		}
	}
	must(consumer.CommitUncommittedOffsets(ctx))
	say("group", read)
	consumer.Close()
}
