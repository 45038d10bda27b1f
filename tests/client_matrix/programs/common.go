package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

const records = 3

// What the test passes to each program; see releases.py.
type Given struct {
	Bootstrap, Topic, Group, Transaction, Mechanism, User, Password, Token string
	CaFile                                                                  string `json:"ca_file"`
	Codecs                                                                  []string
	Refused                                                                 bool
}

func given() (given Given, ctx context.Context) {
	must(json.Unmarshal([]byte(os.Args[1]), &given))
	ctx, _ = context.WithTimeout(context.Background(), 60*time.Second)
	return
}

func (given Given) tls() *tls.Config {
	pem, err := os.ReadFile(given.CaFile)
	must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	return &tls.Config{RootCAs: roots}
}

func say(name string, value any) { fmt.Printf("%s\t%v\n", name, value) }

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
