// Package fencepost reads the answers of a Fencepost proxy. It is one file without dependencies: copy it.
//
//	var mismatch *fencepost.OffsetMismatch
//	if errors.As(fencepost.Of(err), &mismatch) { // err: of kafka-go, for example
//		readTo(mismatch.Actual) // then decide again
//	}
//
// franz-go and sarama drop the message of a refusal: there, read from the expected offset to the end. docs/contract.md
// lists all answers.
package fencepost

import (
	"regexp"
	"strconv"
	"strings"
)

// Outcome of the attempt that was answered.
type Outcome string

const (
	Refused  Outcome = "refused"
	Appended Outcome = "appended" // though at another offset
	Unknown  Outcome = "unknown"  // it may be in the log, or may still be appended
)

// Answer is an answer other than success. Kind is its first word, such as EXPECTATION_REQUIRED.
type Answer struct {
	Code          int16 // -1 if it was read from an error's text
	Kind, Message string
	Outcome       Outcome
	Predecessor   bool // a batch sent before this one failed so, and the numbers are that batch's
	PossiblyYours bool // an earlier attempt may have succeeded: read the records at the expected offset
}

func (answer *Answer) Error() string { return answer.Message }

// OffsetMismatch: nothing was appended, because the log ends at Actual. If Record is not 0, that record of the batch
// contradicts its place, and Actual is the offset that it would have got.
type OffsetMismatch struct {
	Answer
	Expected, Actual int64
	Record           int
}

// OffsetViolation: the batch was appended, at AppendedAt. A writer bypasses the proxy.
type OffsetViolation struct {
	Answer
	Expected, AppendedAt int64
}

// PartitionCount: the keys were placed over Expected partitions, and the topic has Actual. Place them again.
type PartitionCount struct {
	Answer
	Expected, Actual int64
}

func (mismatch *OffsetMismatch) Unwrap() error   { return &mismatch.Answer }
func (violation *OffsetViolation) Unwrap() error { return &violation.Answer }
func (count *PartitionCount) Unwrap() error      { return &count.Answer }

var (
	kind    = regexp.MustCompile(`^(PREDECESSOR_FAILED )?([A-Z_]{2,})\b`)
	inText  = regexp.MustCompile(`(?s)(?:PREDECESSOR_FAILED )?\b(?:[A-Z_]{4,} topic=|TRY_AGAIN |OUTCOME_UNKNOWN ).*`)
	numbers = regexp.MustCompile(`\b(expected|actual|record|appended_at)=(-?\d+)`)
)

// Parse reads a partition's answer in a Produce response. It returns nil for code 0.
func Parse(code int16, message string) error {
	if code == 0 {
		return nil
	}
	answer := Answer{Code: code, Message: message, Outcome: Refused}
	if found := kind.FindStringSubmatch(message); found != nil {
		answer.Predecessor, answer.Kind = found[1] != "", found[2]
	}
	answer.PossiblyYours = strings.Contains(message, " POSSIBLY_YOURS")
	stated := map[string]int64{}
	for _, each := range numbers.FindAllStringSubmatch(message, -1) {
		stated[each[1]], _ = strconv.ParseInt(each[2], 10, 64)
	}
	switch {
	case answer.Kind == "OFFSET_MISMATCH":
		return &OffsetMismatch{answer, stated["expected"], stated["actual"], int(stated["record"])}
	case answer.Kind == "OFFSET_VIOLATION":
		if !answer.Predecessor {
			answer.Outcome = Appended
		}
		return &OffsetViolation{answer, stated["expected"], stated["appended_at"]}
	case answer.Kind == "INVALID_PARTITION_COUNT":
		return &PartitionCount{answer, stated["expected"], stated["actual"]}
	case answer.Kind == "OUTCOME_UNKNOWN" && !answer.Predecessor || message == "":
		answer.Outcome = Unknown
	}
	return &answer
}

// Of reads the error of a client that shows the proxy's message. It returns other errors unchanged.
func Of(err error) error {
	if err == nil {
		return nil
	}
	if message := inText.FindString(err.Error()); message != "" {
		return Parse(-1, message)
	}
	return err
}
