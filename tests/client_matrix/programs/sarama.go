package main

import (
	"context"
	"time"

	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
)

type scramClient struct{ *scram.ClientConversation }

func (client *scramClient) Begin(user, password, authorization string) error {
	made, err := scram.SHA512.NewClient(user, password, authorization)
	if err == nil {
		client.ClientConversation = made.NewConversation()
	}
	return err
}

type tokens struct{ token string }

func (tokens tokens) Token() (*sarama.AccessToken, error) { return &sarama.AccessToken{Token: tokens.token}, nil }

// Reads until the record "committed".
type reader struct {
	read []string
	done func()
}

func (*reader) Setup(sarama.ConsumerGroupSession) error   { return nil }
func (*reader) Cleanup(sarama.ConsumerGroupSession) error { return nil }
func (reader *reader) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		reader.read = append(reader.read, string(message.Value))
		session.MarkMessage(message, "")
		if string(message.Value) == "committed" {
			reader.done()
			return nil
		}
	}
	return nil
}

func main() {
	given, ctx := given()
	config := func() *sarama.Config {
		made := sarama.NewConfig()
		made.Version = sarama.V2_8_0_0
		made.Producer.Return.Successes = true
		made.Producer.RequiredAcks = sarama.WaitForAll
		made.Producer.Partitioner = sarama.NewManualPartitioner
		if given.Mechanism != "" {
			made.Net.TLS.Enable, made.Net.TLS.Config = true, given.tls()
			made.Net.SASL.Enable, made.Net.SASL.Mechanism = true, sarama.SASLMechanism(given.Mechanism)
			made.Net.SASL.User, made.Net.SASL.Password = given.User, given.Password
			made.Net.SASL.TokenProvider = tokens{given.Token}
			made.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient { return &scramClient{} }
		}
		return made
	}
	producer := func(config *sarama.Config) sarama.SyncProducer {
		made, err := sarama.NewSyncProducer([]string{given.Bootstrap}, config)
		must(err)
		return made
	}
	record := func(value string, headers ...sarama.RecordHeader) *sarama.ProducerMessage {
		return &sarama.ProducerMessage{
			Topic: given.Topic, Key: sarama.StringEncoder("k"), Value: sarama.StringEncoder(value), Headers: headers,
		}
	}

	codecs := map[string]sarama.CompressionCodec{
		"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
		"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
	}
	for _, codec := range given.Codecs {
		compressing := config()
		compressing.Producer.Compression = codecs[codec]
		sender, offsets := producer(compressing), []int64{}
		for i := 0; i < records; i++ {
			_, offset, err := sender.SendMessage(record(codec, sarama.RecordHeader{Key: []byte("h"), Value: []byte("v")}))
			must(err)
			offsets = append(offsets, offset)
		}
		say(codec, offsets)
		must(sender.Close())
	}

	transactional := config()
	transactional.Producer.Idempotent, transactional.Net.MaxOpenRequests = true, 1
	transactional.Producer.Transaction.ID = given.Transaction
	sender := producer(transactional)
	for _, value := range []string{"committed", "aborted"} {
		must(sender.BeginTxn())
		_, offset, err := sender.SendMessage(record(value))
		must(err)
		if value == "committed" {
			must(sender.CommitTxn())
		} else {
			must(sender.AbortTxn())
		}
		say(value, offset)
	}
	must(sender.Close())

	if given.Refused {
		sender := producer(config())
		_, _, err := sender.SendMessage(record("x", sarama.RecordHeader{Key: []byte("fencepost-expected-offset"), Value: []byte("0")}))
		say("refused", err)
		_, _, err = sender.SendMessage(record("x"))
		must(err)
		say("after", "appended")
		must(sender.Close())
	}

	reading := config()
	reading.Consumer.Offsets.Initial = sarama.OffsetOldest
	reading.Consumer.IsolationLevel = sarama.ReadCommitted
	reading.Consumer.MaxWaitTime = 100 * time.Millisecond
	group, err := sarama.NewConsumerGroup([]string{given.Bootstrap}, given.Group, reading)
	must(err)
	ctx, cancel := context.WithCancel(ctx)
	reader := &reader{done: cancel}
	must(group.Consume(ctx, []string{given.Topic}, reader))
	say("group", reader.read)
	must(group.Close())
}
