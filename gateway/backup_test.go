package gateway

import (
	"context"
	"errors"
	"io"
	"testing"
)

type backups func(w io.Writer) error

func (f backups) Backup(_ context.Context, w io.Writer) error { return f(w) }

func TestBackup(t *testing.T) {
	h := newHarness(t)
	h.server.Backups = backups(func(w io.Writer) error { _, err := io.WriteString(w, "all"); return err })
	h.remount()
	a := h.do("GET", "/v1/admin/backup", "").want(200, "")
	if string(a.body) != "all" || a.header.Get("Content-Type") != "application/zstd" ||
		a.header.Get("Cache-Control") != "private, no-store" {
		t.Errorf("%q %v", a.body, a.header)
	}
	h.server.Backups = backups(func(io.Writer) error { return errors.New("no NATS") })
	h.remount()
	h.do("GET", "/v1/admin/backup", "").want(500, "internal")

	h.server.Backups = backups(func(w io.Writer) error {
		_, err := w.Write(make([]byte, 1<<20))
		return errors.Join(err, errors.New("NATS went away"))
	})
	h.remount()
	resp, err := h.client.Do(h.request("GET", "/v1/admin/backup", ""))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("half a backup passes for a whole one")
	}

	h.key = h.stub.addKey("acme", "enterprise", asUser)
	h.do("GET", "/v1/admin/backup", "").want(403, "forbidden")
}
