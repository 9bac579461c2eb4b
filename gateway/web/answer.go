package web

import (
	"bytes"
	"io"
	"net/http"
)

// SmallOutput is the largest output for which an answer is encoded in memory, so that it has a
// Content-Length.
const SmallOutput = 64 << 10

// WriteOutput answers with the JSON that write writes. output is its number of bytes of program
// output. A large answer is sent while it is encoded: it may be six times as long as the output.
func WriteOutput(w http.ResponseWriter, output int, write func(io.Writer) error) error {
	if output > SmallOutput {
		JSONHeader(w.Header())
		if err := write(w); err != nil {
			return err
		}
		_, err := io.WriteString(w, "\n")
		return err
	}
	var body bytes.Buffer
	if err := write(&body); err != nil {
		return err
	}
	WriteJSON(w, http.StatusOK, body.Bytes())
	return nil
}

// ContentPolicy prevents files of tenants from acting as pages of this server in a browser.
const ContentPolicy = "default-src 'none'; sandbox; frame-ancestors 'none'"
