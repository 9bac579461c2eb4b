// Package mask replaces secrets in texts that pass in pieces.
package mask

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
)

// MinLine is the minimum length of a secret's line that is masked by itself.
const MinLine = 4

// Text takes the place of a secret.
const Text = "***"

// Masks are secrets to replace in texts. All are found in one pass, with the automaton of Aho and
// Corasick: the time depends neither on their number nor on partial matches. Overlapping secrets
// are replaced together, byte by byte.
type Masks struct {
	nodes  []state
	root   [256]int32       // the children of the root
	others map[uint64]int32 // all children of a node but the first, by edge
}

// state is a node of the automaton: the longest suffix of the text that starts a secret. Node 0 is
// the root, the empty text, and as a child means no node.
type state struct {
	child int32 // the first child, by label; see also others
	fail  int32 // the node of the longest proper end of its text that has one
	depth int32 // the length of its text
	match int32 // the length of the longest secret that ends here, 0 for none
	label byte
}

func edge(node int32, b byte) uint64 { return uint64(node)<<8 | uint64(b) }

// New returns the masks of secrets, and of their lines.
func New(secrets []string) *Masks {
	if len(secrets) == 0 {
		return new(Masks)
	}
	m := &Masks{nodes: make([]state, 1), others: map[uint64]int32{}}
	for _, secret := range secrets {
		m.add(secret)
		for line := range strings.Lines(secret) {
			if line = strings.TrimRight(line, "\r\n"); len(line) >= MinLine {
				m.add(line)
			}
		}
	}
	m.link()
	return m
}

// child returns the child of a node for a byte, 0 for none.
func (m *Masks) child(node int32, b byte) int32 {
	if node == 0 {
		return m.root[b]
	}
	n := &m.nodes[node]
	if n.child == 0 || n.label == b {
		return n.child
	}
	return m.others[edge(node, b)]
}

func (m *Masks) add(secret string) {
	node := int32(0)
	for i := range len(secret) {
		b := secret[i]
		next := m.child(node, b)
		if next == 0 {
			next = int32(len(m.nodes))
			m.nodes = append(m.nodes, state{depth: m.nodes[node].depth + 1})
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
func (m *Masks) link() {
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
func (m *Masks) next(state int32, b byte) int32 {
	for state != 0 {
		if child := m.child(state, b); child != 0 {
			return child
		}
		state = m.nodes[state].fail
	}
	return m.root[b]
}

// Writer masks secrets and writes to another writer. It holds back a possible beginning of one,
// until Flush.
type Writer struct {
	// KeepLength makes a mask as long as what it replaces.
	KeepLength bool

	masks *Masks
	next  io.Writer
	state int32
	held  []byte // as long as the text of state
	found []span // the secrets in held, in order and not overlapping
	begun bool   // the mask of the first one is written already
}

// Writer returns a writer to w, which must accept everything.
func (m *Masks) Writer(w io.Writer) *Writer { return &Writer{masks: m, next: w} }

// String returns s with masks.
func (m *Masks) String(s string) string {
	var masked strings.Builder
	w := m.Writer(&masked)
	_, _ = w.Write([]byte(s))
	w.Flush()
	return masked.String()
}

// JSON returns a valid JSON text with masks in its strings and numbers, names of members included. A
// number with a mask becomes a string.
func (m *Masks) JSON(text []byte) []byte {
	if len(m.nodes) <= 1 {
		return text
	}
	masked := make([]byte, 0, len(text))
	for i := 0; i < len(text); {
		end := i + scalarLen(text[i:])
		if end == i {
			masked = append(masked, text[i])
			i++
			continue
		}
		masked = append(masked, m.scalar(text[i:end])...)
		i = end
	}
	return masked
}

// scalarLen returns the length of the string or number at the beginning of a JSON text; 0 if there is none.
func scalarLen(text []byte) (n int) {
	if text[0] != '"' {
		for n < len(text) && (strings.IndexByte("+-.0123456789", text[n]) >= 0 || n > 0 && text[n]|' ' == 'e') {
			n++
		}
		return n
	}
	for n = 1; text[n] != '"'; n++ {
		if text[n] == '\\' {
			n++
		}
	}
	return n + 1
}

// scalar returns a string or number of a JSON text with masks.
func (m *Masks) scalar(text []byte) []byte {
	value := string(text)
	if text[0] == '"' {
		if err := json.Unmarshal(text, &value); err != nil {
			panic(err) // the text is valid
		}
	}
	masked := m.String(value)
	if masked == value {
		return text
	}
	encoded, err := json.Marshal(masked)
	if err != nil {
		panic(err) // strings can be encoded
	}
	return encoded
}

// span is a part of a text.
type span struct{ from, to int }

// Write never fails.
func (w *Writer) Write(p []byte) (int, error) {
	w.write(p, false)
	return len(p), nil
}

// Flush writes the held-back text. It is called after the last write.
func (w *Writer) Flush() { w.write(nil, true) }

func (w *Writer) write(p []byte, last bool) {
	if len(w.masks.nodes) <= 1 {
		_, _ = w.next.Write(p)
		return
	}
	text := append(w.held, p...)
	for i := len(w.held); i < len(text); i++ {
		w.state = w.masks.next(w.state, text[i])
		if n := int(w.masks.nodes[w.state].match); n > 0 {
			w.find(span{i + 1 - n, i + 1})
		}
	}
	end := len(text) - int(w.masks.nodes[w.state].depth)
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
		switch {
		case w.KeepLength:
			out = append(out, bytes.Repeat([]byte("*"), min(s.to, end)-s.from)...)
		case i > 0 || !w.begun:
			out = append(out, Text...)
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
func (w *Writer) find(s span) {
	for n := len(w.found); n > 0 && w.found[n-1].to > s.from; n-- {
		s.from = min(s.from, w.found[n-1].from)
		w.found = w.found[:n-1]
	}
	w.found = append(w.found, s)
}
