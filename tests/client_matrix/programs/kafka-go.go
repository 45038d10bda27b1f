package main

import (
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
)

// This client has no transactions, and does not report offsets.
func main() {
	given, ctx := given()
	transport := &kafka.Transport{}
	dialer := &kafka.Dialer{Timeout: 10 * time.Second}
	if given.Mechanism != "" {
		var login sasl.Mechanism = plain.Mechanism{Username: given.User, Password: given.Password}
		if given.Mechanism != "PLAIN" {
			made, err := scram.Mechanism(scram.SHA512, given.User, given.Password)
			must(err)
			login = made
		}
		transport.TLS, transport.SASL = given.tls(), login
		dialer.TLS, dialer.SASLMechanism = given.tls(), login
	}
	writer := func(codec kafka.Compression) *kafka.Writer {
		return &kafka.Writer{
			Addr: kafka.TCP(given.Bootstrap), Topic: given.Topic, RequiredAcks: kafka.RequireAll, Compression: codec,
			BatchTimeout: 10 * time.Millisecond, Transport: transport,
		}
	}
	record := func(value string, headers ...kafka.Header) kafka.Message {
		return kafka.Message{Key: []byte("k"), Value: []byte(value), Headers: headers}
	}

	codecs := map[string]kafka.Compression{
		"none": 0, "gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd,
	}
	for _, codec := range given.Codecs {
		sender := writer(codecs[codec])
		for i := 0; i < records; i++ {
			must(sender.WriteMessages(ctx, record(codec, kafka.Header{Key: "h", Value: []byte("v")})))
		}
		say(codec, "appended")
		must(sender.Close())
	}
	sender := writer(0)
	if given.Refused {
		say("refused", sender.WriteMessages(ctx, record("x", kafka.Header{Key: "fencepost-expected-offset", Value: []byte("0")})))
		must(sender.WriteMessages(ctx, record("x")))
		say("after", "appended")
	}
	must(sender.WriteMessages(ctx, record("committed")))
	must(sender.Close())

	consumer := kafka.NewReader(kafka.ReaderConfig{
		Brokers: []string{given.Bootstrap}, GroupID: given.Group, Topic: given.Topic, Dialer: dialer,
		StartOffset: kafka.FirstOffset, MaxWait: 100 * time.Millisecond, IsolationLevel: kafka.ReadCommitted,
	})
	read := []string{}
	for len(read) == 0 || read[len(read)-1] != "committed" {
		message, err := consumer.ReadMessage(ctx)
		must(err)
		if string(message.Value) != "x" {
			read = append(read, string(message.Value))
		}
	}
	say("group", read)
	must(consumer.Close())
}
