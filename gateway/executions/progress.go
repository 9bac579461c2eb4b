package executions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// maxProgress is the size of the text of one report of progress in bytes. The end of longer text is
// sent.
const maxProgress = 4 << 10

// WaitWithProgress is [Run.Wait] for a streamed execution. It calls progress with new output, and
// from time to time without. An error of progress ends the wait.
func (x *Run) WaitWithProgress(ctx context.Context, progress func(string) error) (record *proto.Record, err error) {
	err = x.follow(ctx, func(batch proto.Events, tail web.Tail) error {
		start := time.Now()
		var err error
		for err == nil {
			if record = batch.Result; record != nil {
				return nil
			}
			if text := outputText(batch.Lines); text != "" {
				if err := progress(text); err != nil {
					return err
				}
			}
			batch, err = nextUntil(ctx, x.Core, tail, time.Now().Add(web.Keepalive))
			if errors.Is(err, web.ErrDeadline) && !x.HasLeft() {
				batch, err = proto.Events{}, progress(fmt.Sprintf("running for %s", time.Since(start).Round(time.Second)))
			}
		}
		if errors.Is(err, io.EOF) {
			err = fmt.Errorf("events of %s have no result", x.ID)
		}
		return err
	})
	return record, waitError(x.ID, err)
}

// outputText returns the output in the lines of events; of long output, only the end.
func outputText(lines []byte) string {
	var text []byte
	for line := range bytes.Lines(lines) {
		var event struct{ Type, Data string }
		if json.Unmarshal(line, &event) == nil && event.Type == "output" {
			text = append(text, event.Data...)
		}
	}
	return strings.ToValidUTF8(string(text[max(0, len(text)-maxProgress):]), "")
}
