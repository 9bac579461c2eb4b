package contexts

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestReaderMissesNothing has readers that keep up with a program whose events differ in size, while a large event takes
// the place of many small ones.
func TestReaderMissesNothing(t *testing.T) {
	e := new(memory).newEvents()
	text := strings.Repeat("x", maxRunEvents/10)
	const events = 3_000
	var readers []*reader
	for range 3 {
		readers = append(readers, e.read(0))
	}
	go func() {
		for i := range events {
			size := 200
			if i%100 == 99 {
				size = len(text)
			}
			e.add(i == events-1, func(seq int64) any {
				return struct {
					base
					Text string `json:"text"`
				}{base{Type: "stdout", Seq: seq}, text[:size]}
			})
		}
	}()
	done := make(chan struct{})
	for _, r := range readers {
		go func() {
			defer func() { done <- struct{}{} }()
			defer r.close()
			for want := int64(1); ; {
				line, ended, changed := r.line()
				if line == nil && ended {
					if want != events+1 {
						t.Errorf("the last event was %d", want-1)
					}
					return
				}
				if line == nil {
					<-changed
					continue
				}
				var got base
				if err := json.Unmarshal(line, &got); err != nil || got.Type == "gap" || got.Seq != want {
					t.Errorf("event %d: %s %d, %v", want, got.Type, got.Seq, err)
					return
				}
				want++
			}
		}()
	}
	for range readers {
		<-done
	}
}
