package worker

import (
	"bytes"
	"io"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
)

// minSecretLine is the length from which a line of a secret is a secret by itself.
const minSecretLine = 4

// masked takes the place of a secret in the output.
var masked = []byte("***")

// masks replaces secrets in the outputs of a program.
type masks struct {
	secrets [][]byte  // the longest first
	first   [256]bool // whether a secret begins with a byte
	writers []*maskWriter
}

// newMasks returns the masks of a job, which has values of Env as secrets.
func newMasks(job *proto.Job) *masks {
	m := new(masks)
	for _, name := range job.Secrets {
		value := job.Env[name]
		m.add(value)
		for line := range strings.Lines(value) {
			if line = strings.TrimRight(line, "\r\n"); len(line) >= minSecretLine {
				m.add(line)
			}
		}
	}
	slices.SortFunc(m.secrets, func(a, b []byte) int { return len(b) - len(a) })
	return m
}

func (m *masks) add(secret string) {
	if secret != "" {
		m.secrets = append(m.secrets, []byte(secret))
		m.first[secret[0]] = true
	}
}

// writer returns a writer that writes to w without the secrets.
func (m *masks) writer(w io.Writer) io.Writer {
	if len(m.secrets) == 0 {
		return w
	}
	mw := &maskWriter{masks: m, next: w}
	m.writers = append(m.writers, mw)
	return mw
}

// flush writes what the writers hold back. It is called after the last write.
func (m *masks) flush() {
	for _, w := range m.writers {
		w.write(nil, true)
	}
}

// maskWriter holds back what may be the beginning of a secret.
type maskWriter struct {
	*masks
	next io.Writer
	held []byte
}

func (w *maskWriter) Write(p []byte) (int, error) {
	w.write(p, false)
	return len(p), nil
}

func (w *maskWriter) write(p []byte, last bool) {
	text := append(w.held, p...)
	w.held = nil
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); {
		if !w.first[text[i]] {
			out = append(out, text[i])
			i++
			continue
		}
		rest := text[i:]
		if !last && slices.ContainsFunc(w.secrets, func(s []byte) bool { return len(s) > len(rest) && bytes.HasPrefix(s, rest) }) {
			w.held = bytes.Clone(rest)
			break
		}
		found := slices.IndexFunc(w.secrets, func(s []byte) bool { return bytes.HasPrefix(rest, s) })
		if found < 0 {
			out = append(out, text[i])
			i++
			continue
		}
		out = append(out, masked...)
		i += len(w.secrets[found])
	}
	if len(out) > 0 {
		_, _ = w.next.Write(out) // the outputs of programs take everything
	}
}
