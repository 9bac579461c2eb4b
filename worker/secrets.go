package worker

import (
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// minSecretLine is the length from which a line of a secret is a secret by itself.
const minSecretLine = 4

// masked takes the place of a secret in the output.
const masked = "***"

// masks replaces secrets in the outputs of a program. It finds all of them in one pass, with the
// automaton of Aho and Corasick: the time does not depend on their number, nor on how much of one
// is in the output. Bytes of secrets that overlap are all replaced, together.
type masks struct {
	nodes   []maskNode
	root    [256]int32       // the children of the root
	others  map[uint64]int32 // all children of a node but the first, by edge
	writers []*maskWriter
}

// maskNode is a state of the automaton: the longest end of the text with which a secret begins.
// Node 0 is the root, the empty text, and stands for no node as a child.
type maskNode struct {
	child int32 // the first child, by label; see also others
	fail  int32 // the node of the longest proper end of its text that has one
	depth int32 // the length of its text
	match int32 // the length of the longest secret with which its text ends, 0 for none
	label byte
}

func edge(node int32, b byte) uint64 { return uint64(node)<<8 | uint64(b) }

// withSecrets returns the environment of a job with the secrets that are variables.
func withSecrets(job *proto.Job, secrets map[string][]byte) map[string]string {
	if len(secrets) == 0 {
		return job.Env
	}
	env := map[string]string{}
	maps.Copy(env, job.Env)
	for _, b := range job.Bound {
		if b.Env != "" {
			env[b.Env] = string(secrets[b.Secret])
		}
	}
	return env
}

// secretFiles returns the files of the secrets of a job. Each jail has a tmpfs of its own for them.
func secretFiles(job *proto.Job, secrets map[string][]byte) (files []jail.File) {
	for _, b := range job.Bound {
		if b.Env == "" {
			files = append(files, jail.File{Path: jail.SecretsDir + "/" + b.Secret, Mode: 0o444, Owner: jail.OwnerInit, Content: secrets[b.Secret]})
		}
	}
	return files
}

// newMasks returns the masks of a job: of values of Env, and of bound secrets.
func newMasks(job *proto.Job, bound map[string][]byte) *masks {
	var values []string
	for _, name := range job.Secrets {
		values = append(values, job.Env[name])
	}
	for _, b := range job.Bound {
		if b.Mask {
			values = append(values, string(bound[b.Secret]))
		}
	}
	if len(values) == 0 {
		return new(masks)
	}
	m := &masks{nodes: make([]maskNode, 1), others: map[uint64]int32{}}
	for _, value := range values {
		m.add(value)
		for line := range strings.Lines(value) {
			if line = strings.TrimRight(line, "\r\n"); len(line) >= minSecretLine {
				m.add(line)
			}
		}
	}
	m.link()
	return m
}

// child returns the child of a node for a byte, 0 for none.
func (m *masks) child(node int32, b byte) int32 {
	if node == 0 {
		return m.root[b]
	}
	n := &m.nodes[node]
	if n.child == 0 || n.label == b {
		return n.child
	}
	return m.others[edge(node, b)]
}

func (m *masks) add(secret string) {
	node := int32(0)
	for i := range len(secret) {
		b := secret[i]
		next := m.child(node, b)
		if next == 0 {
			next = int32(len(m.nodes))
			m.nodes = append(m.nodes, maskNode{depth: m.nodes[node].depth + 1})
			switch n := &m.nodes[node]; {
			case node == 0:
				m.root[b] = next
			case n.child == 0:
				n.child, n.label = next, b
			default:
				m.others[edge(node, b)] = next
			}
		}
		node = next
	}
	m.nodes[node].match = m.nodes[node].depth
}

// link sets fail and match of all nodes, the shorter ones first.
func (m *masks) link() {
	type step struct {
		from, to int32
		b        byte
	}
	var steps []step
	for b, to := range m.root {
		if to != 0 {
			steps = append(steps, step{0, to, byte(b)})
		}
	}
	for i := range m.nodes {
		if n := &m.nodes[i]; n.child != 0 {
			steps = append(steps, step{int32(i), n.child, n.label})
		}
	}
	for e, to := range m.others {
		steps = append(steps, step{int32(e >> 8), to, byte(e)})
	}
	slices.SortFunc(steps, func(a, b step) int { return int(m.nodes[a.to].depth - m.nodes[b.to].depth) })
	for _, s := range steps {
		n := &m.nodes[s.to]
		if s.from != 0 {
			n.fail = m.next(m.nodes[s.from].fail, s.b)
		}
		n.match = max(n.match, m.nodes[n.fail].match)
	}
}

// next returns the state after a byte.
func (m *masks) next(state int32, b byte) int32 {
	for state != 0 {
		if child := m.child(state, b); child != 0 {
			return child
		}
		state = m.nodes[state].fail
	}
	return m.root[b]
}

// writer returns a writer that writes to w without the secrets.
func (m *masks) writer(w io.Writer) io.Writer {
	if len(m.nodes) <= 1 {
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
	next  io.Writer
	state int32
	held  []byte // as long as the text of state
	found []span // the secrets in held, in order and not overlapping
	begun bool   // the mask of the first one is written already
}

// span is a part of a text.
type span struct{ from, to int }

func (w *maskWriter) Write(p []byte) (int, error) {
	w.write(p, false)
	return len(p), nil
}

func (w *maskWriter) write(p []byte, last bool) {
	text := append(w.held, p...)
	for i := len(w.held); i < len(text); i++ {
		w.state = w.masks.next(w.state, text[i])
		if n := int(w.nodes[w.state].match); n > 0 {
			w.find(span{i + 1 - n, i + 1})
		}
	}
	end := len(text) - int(w.nodes[w.state].depth)
	if last {
		end = len(text)
	}
	out, at := make([]byte, 0, end), 0
	rest := w.found[:0:0]
	begun := w.begun && end == 0
	for i, s := range w.found {
		if s.from >= end {
			rest = append(rest, span{s.from - end, s.to - end})
			continue
		}
		if s.from > at {
			out = append(out, text[at:s.from]...)
		}
		if i > 0 || !w.begun {
			out = append(out, masked...)
		}
		at = min(s.to, end)
		if s.to > end { // it may grow
			rest, begun = append(rest, span{0, s.to - end}), true
		}
	}
	out = append(out, text[at:end]...)
	w.held, w.found, w.begun = slices.Clone(text[end:]), rest, begun
	if len(out) > 0 {
		_, _ = w.next.Write(out) // the outputs of programs take everything
	}
}

// find adds a secret that ends where the text does. It takes in those that it overlaps.
func (w *maskWriter) find(s span) {
	for n := len(w.found); n > 0 && w.found[n-1].to > s.from; n-- {
		s.from = min(s.from, w.found[n-1].from)
		w.found = w.found[:n-1]
	}
	w.found = append(w.found, s)
}
