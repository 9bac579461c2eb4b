package app

import "context"

// Check is one requirement of this machine and how it is met.
type Check struct {
	Name     string `json:"name"`
	OK       bool   `json:"ok"`
	Optional bool   `json:"optional"` // jobs can run without it
	Found    string `json:"found"`
	Remedy   string `json:"remedy,omitempty"` // what to do when it is not OK
}

// Doctor checks what this process would need with the settings of c.
func Doctor(_ context.Context, _ *Config) []Check { return nil }
