// Package up has the topology that `bullpen up` starts unless it is given another.
package up

import _ "embed"

// Default is a topology in YAML, which package cmd/internal/up reads.
//
//go:embed topology.yaml
var Default []byte
