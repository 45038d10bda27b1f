package fencepost

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What contract/schema.json calls an error: what a client reads from an answer.
type read struct {
	Kind, Outcome    string
	Predecessor      bool
	PossiblyYours    bool  `json:"possibly_yours"`
	Expected, Actual int64 `json:",string"`
	Record           int   `json:",string"`
	AppendedAt       int64 `json:"appended_at,string"`
}

func readOf(t *testing.T, err error) read {
	var answer *Answer
	if !errors.As(err, &answer) {
		t.Fatal("no answer:", err)
	}
	found := read{Kind: answer.Kind, Outcome: string(answer.Outcome), Predecessor: answer.Predecessor, PossiblyYours: answer.PossiblyYours}
	switch typed := err.(type) {
	case *OffsetMismatch:
		found.Expected, found.Actual, found.Record = typed.Expected, typed.Actual, typed.Record
	case *OffsetViolation:
		found.Expected, found.AppendedAt = typed.Expected, typed.AppendedAt
	case *PartitionCount:
		found.Expected, found.Actual = typed.Expected, typed.Actual
	}
	return found
}

func TestEachAnswerOfTheContractIsRead(t *testing.T) {
	files, _ := filepath.Glob("../../contract/cases/*.json")
	kinds := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var cases []struct {
			Name  string
			Steps []struct {
				Produce []struct {
					Partitions []struct {
						Answer struct {
							Code    int16
							Message string
							Error   *read
						}
					}
				}
			}
		}
		if err := json.Unmarshal(text, &cases); err != nil {
			t.Fatal(file, err)
		}
		for _, each := range cases {
			for _, step := range each.Steps {
				for _, request := range step.Produce {
					for _, part := range request.Partitions {
						if answer := part.Answer; answer.Error != nil && answer.Error.Kind != "" {
							message := strings.TrimSuffix(answer.Message, "…")
							shown := fmt.Errorf("[%d] Kafka's own words: %s ", answer.Code, message)
							for _, err := range []error{Parse(answer.Code, message), Of(shown), Of(fmt.Errorf("%w", shown))} {
								if found := readOf(t, err); found != *answer.Error {
									t.Errorf("%s: %q was read as %+v, expected %+v", each.Name, message, found, *answer.Error)
								}
							}
							kinds[answer.Error.Kind] = true
						}
					}
				}
			}
		}
	}
	if len(kinds) < 15 {
		t.Error("few kinds of answers:", kinds)
	}
}

func TestOtherErrorsAreLeftAlone(t *testing.T) {
	for _, text := range []string{"POLICY_VIOLATION: Request parameters do not satisfy the configured policy", "SASL_SSL failed"} {
		if other := errors.New(text); Of(other) != other {
			t.Error("taken for an answer of the proxy:", text)
		}
	}
	if Of(nil) != nil || Parse(0, "") != nil {
		t.Error("success taken for an error")
	}
	if found := readOf(t, Parse(44, "")); found.Outcome != "unknown" {
		t.Error("without a message, nothing is known:", found)
	}
}
