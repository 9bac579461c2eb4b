package gateway

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const volumeWork = `{"slug":"work","kind":"volume","bytes":"2MiB","prefix":"base"}`

// newVolumeHarness starts a server with the connections data, a bucket, and work, a volume, of acme.
// It returns the threads of the server.
func newVolumeHarness(t *testing.T) (*harness, *threads) {
	h := newConnectionHarness(t)
	h.do("POST", connections, volumeWork).want(201, "")
	return h, h.server.Versions.(*threads)
}

// putVolume gives a volume of acme versions up to a number, and files.
func (s *threads) putVolume(slug string, number int64, files map[string][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := proto.VolumeThread(slug)
	head := &proto.Thread{Org: "acme", ID: id, Version: &proto.Version{Number: number, Bytes: 7, Files: 2}}
	for n := number - 1; n > 0; n-- {
		head.History = append(head.History, proto.Version{Number: n})
	}
	s.heads[key("acme", id)] = head
	for name, body := range files {
		s.files[key(key("acme", id), name)] = body
	}
}

func TestVolumeForks(t *testing.T) {
	h, stored := newVolumeHarness(t)
	fork := func(body string) *reply { return h.do("POST", connections+"/work/fork", body) }
	fork(`{"slug":"empty"}`).want(201, "")
	if v := h.do("GET", connections+"/empty/volume", "").want(200, "").json(); v["version"] != 0.0 ||
		v["quota"] != "2MiB" || v["holder"] != nil {
		t.Errorf("%v", v)
	}
	fork(`{"slug":"old","version":1}`).want(404, "not_found", "version")
	stored.putVolume("work", 3, nil)
	if v := h.do("GET", connections+"/work/volume", "").want(200, "").json(); v["version"] != 3.0 || v["bytes"] != 7.0 ||
		v["files"] != 2.0 || len(v["versions"].([]any)) != 3 {
		t.Errorf("%v", v)
	}
	made := fork(`{"slug":"snapshot","read_only":true,"description":"d"}`).want(201, "")
	if c := made.json(); c["kind"] != "volume" || c["bytes"] != "2MiB" || c["prefix"] != "base" ||
		c["read_only"] != true || c["description"] != "d" ||
		made.header.Get("Location") != connections+"/snapshot" || made.header.Get("ETag") == "" {
		t.Errorf("%v, %v", c, made.header)
	}
	// A snapshot stays one. A fork of it does not.
	const change = `{"kind":"volume","bytes":"4MiB","prefix":"base","read_only":`
	h.do("PUT", connections+"/snapshot", change+`false}`).want(400, "validation_error", "read_only must stay true")
	h.do("PUT", connections+"/snapshot", `{"kind":"volume","bytes":"4MiB"}`).want(400, "validation_error",
		"read_only must stay true")
	if c := h.do("PUT", connections+"/snapshot", change+`true,"description":"e"}`).want(
		200, "").json(); c["bytes"] != "4MiB" || c["snapshot"] != true {
		t.Errorf("%v", c)
	}
	if c := h.do("POST", connections+"/snapshot/fork", `{"slug":"writable"}`).want(
		201, "").json(); c["read_only"] != false || c["snapshot"] != nil {
		t.Errorf("%v", c)
	}
	h.do("POST", connections, `{"slug":"quiet","kind":"volume","bytes":"1MiB","read_only":true}`).want(201, "")
	h.do("PUT", connections+"/quiet", `{"kind":"volume","bytes":"1MiB"}`).want(200, "")
	fork(`{"slug":"old","version":1}`).want(201, "")
	fork(`{"slug":"none","version":4}`).want(404, "not_found", "version")
	h.do("GET", connections+"/none", "").want(404, "not_found")
	for _, slug := range []string{"snapshot", "work", "data"} {
		fork(`{"slug":"`+slug+`"}`).want(409, "conflict")
	}
	for _, body := range []string{
		`{}`, `{"slug":"Old"}`, `{"slug":"a/b"}`, `{"slug":"volume=x"}`,
		`{"slug":"n","version":0}`, `{"slug":"n","bytes":"1GiB"}`,
	} {
		fork(body).want(400, "validation_error")
	}
	// Files of a volume that another gateway has begun to fork or has not removed to the end.
	stored.putVolume("left", 1, nil)
	fork(`{"slug":"left"}`).want(409, "conflict", "still stored")
	// If the connection cannot be stored, the files are removed.
	full := &fullConnections{connectionStore: h.server.Connections.(*connectionStore)}
	h.server.Connections = full
	h.remount()
	fork(`{"slug":"full"}`).want(400, "validation_error", "too many")
	if _, err := stored.Get(t.Context(), "acme", proto.VolumeThread("full")); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("the files of a fork without a connection: %v", err)
	}
	// If it exists or may exist, they stay.
	for i, err := range []error{proto.ErrExists, context.DeadlineExceeded} {
		full.err = err
		slug := []string{"theirs", "unknown"}[i]
		if r := fork(`{"slug":"` + slug + `"}`); r.status < 400 {
			t.Errorf("%s: %v", slug, r.status)
		}
		if _, err := stored.Get(t.Context(), "acme", proto.VolumeThread(slug)); err != nil {
			t.Errorf("the files of a connection that may exist: %v", err)
		}
	}
	h.server.Connections = full.connectionStore
	h.remount()
	for _, method := range []string{"volume", "archive"} {
		h.do("GET", connections+"/data/"+method, "").want(409, "conflict", "no volume")
		h.do("GET", connections+"/none/"+method, "").want(404, "not_found")
		h.orgAdmin("other").do("GET", connections+"/work/"+method+"?org=acme", "").want(404, "not_found")
	}
	h.do("POST", connections+"/data/fork", `{"slug":"n"}`).want(409, "conflict", "no volume")
	h.orgAdmin("other").do("POST", connections+"/work/fork?org=acme", `{"slug":"n"}`).want(404, "not_found")
	forked := 0
	for _, r := range h.audit.all() {
		if r.Action == "connection.fork" && r.Stage == api.AuditOutcome && r.Error == nil {
			forked++
			if r.Before != nil || r.After == nil || r.Object.Name == "work" {
				t.Errorf("%+v", r)
			}
		}
	}
	if forked != 4 {
		t.Errorf("%d forks are recorded", forked)
	}
}

// fullConnections refuse new connections.
type fullConnections struct {
	*connectionStore
	err error
}

func (f *fullConnections) Create(context.Context, proto.Connection) error {
	if f.err != nil {
		return f.err
	}
	return proto.FieldErrorf("slug", "would be one too many")
}

func TestVolumeArchive(t *testing.T) {
	h, stored := newVolumeHarness(t)
	read := func(query string) string {
		t.Helper()
		a := h.do("GET", connections+"/work/archive"+query, "").want(200, "")
		if a.header.Get("Content-Type") != "application/x-tar" {
			t.Errorf("%v", a.header)
		}
		in := tar.NewReader(bytes.NewReader(a.body))
		if _, err := in.Next(); errors.Is(err, io.EOF) {
			return "nothing"
		} else if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if got := read(""); got != "nothing" {
		t.Errorf("an empty volume has %q", got)
	}
	h.do("GET", connections+"/work/archive?path=a", "").want(404, "not_found")
	h.do("GET", connections+"/work/archive?version=1", "").want(404, "not_found")
	stored.putVolume("work", 3, nil)
	for query, want := range map[string]string{
		"": "version 3base", "?version=2": "version 2base", "?path=a/b": "version 3base/a/b",
		"?path=/data/work/a": "version 3base/a", "?path=/": "version 3base",
	} {
		if got := read(query); got != want {
			t.Errorf("%s: %q, want %q", query, got, want)
		}
	}
	h.do("GET", connections+"/work/archive?version=4", "").want(404, "not_found")
	for _, query := range []string{"?path=../x", "?path=a/../../x", "?version=0"} {
		h.do("GET", connections+"/work/archive"+query, "").want(400, "validation_error")
	}
}

func TestVolumeRemoval(t *testing.T) {
	h, stored := newVolumeHarness(t)
	id, user := h.newKey("acme", `[{"connection":"work"}]`)
	stored.putVolume("work", 3, nil)
	h.do("DELETE", connections+"/work", "").want(409, "conflict", id)
	h.stub.onSubmit = nil // they are queued
	running := user.execute(hello, "Prefer", "respond-async").want(202, "")
	user.execute(hello).want(409, "conflict", "volume work is in use by execution "+string(running.trace()))
	h.do("DELETE", "/v1/admin/keys/"+id, "").want(200, "")
	h.do("DELETE", connections+"/work", "").want(
		409, "conflict", "volume work is in use by execution "+string(running.trace()))
	if _, err := stored.Get(t.Context(), "acme", proto.VolumeThread("work")); err != nil {
		t.Error(err)
	}
	if c := h.do("GET", connections+"/work", "").want(200, "").json(); c["removing"] != true {
		t.Errorf("%v", c)
	}
	h.do("PUT", connections+"/work", volumeWork).want(409, "conflict", "being removed")
	h.do("POST", connections+"/work/fork", `{"slug":"fork"}`).want(409, "conflict", "being removed")
	h.do("GET", connections+"/work/archive", "").want(409, "conflict", "being removed")
	h.do("GET", connections+"/work/volume", "").want(200, "")
	h.do("POST", "/v1/admin/keys", `{"name":"n","org":"acme","mounts":[{"connection":"work"}]}`).want(
		409, "conflict", "being removed")
	h.stub.finish(running.trace(), proto.Exited(0))
	h.do("DELETE", connections+"/work", "").want(200, "")
	if _, err := stored.Get(t.Context(), "acme", proto.VolumeThread("work")); !errors.Is(err, proto.ErrNotFound) {
		t.Errorf("%v", err)
	}
	h.do("POST", connections, volumeWork).want(201, "")
	h.do("DELETE", connections+"/work", "").want(200, "") // of which nothing is stored
}

func TestVolumeMounts(t *testing.T) {
	h, stored := newVolumeHarness(t)
	h.do("POST", connections, `{"slug":"snapshot","kind":"volume","bytes":"1GiB","read_only":true}`).want(201, "")
	_, reader := h.newKey("acme", `[{"connection":"work","read_only":true}]`)
	sub := func(path string) string { return body("sub_paths", []string{"/data/work/" + path}) }
	reader.execute(sub("a")).want(400, "validation_error", "sub_paths", "exist")
	_, user := h.newKey("acme", `[{"connection":"snapshot"},{"connection":"work","prefix":"a"}]`)
	job := h.jobOf(user.execute(hello).want(200, ""))
	if !job.HasMounts || !job.HasVolumes || len(job.Volumes) != 1 || job.Volumes[0] != "work" || len(job.Mounts) != 2 ||
		!job.Mounts[0].ReadOnly ||
		job.Mounts[1].Prefix != "base/a" || job.Mounts[1].At != "a" || job.Mounts[1].Bytes != 2<<20 {
		t.Errorf("%+v", job)
	}
	stored.putVolume("work", 1, map[string][]byte{"base": nil, "base/a": nil, "base/a/f": []byte("x")})
	job = h.jobOf(reader.execute(sub("a")).want(200, ""))
	if !job.HasVolumes || job.Volumes != nil || job.Mounts[0].Prefix != "base/a" {
		t.Errorf("%+v", job)
	}
	// That look is no transfer, which slow downloads could use up.
	for range web.MaxTransfers {
		done, err := h.server.Transfers.Begin(t.Context(), "acme")
		if err != nil {
			t.Fatal(err)
		}
		defer done()
	}
	reader.execute(sub("b")).want(400, "validation_error", "sub_paths", "exist")
	reader.execute(sub("a/f")).want(400, "validation_error", "sub_paths", "exist")
	user.execute(sub("a/new")).want(200, "") // the worker creates it
	// A program that only reads is accepted beside one that changes the volume.
	h.stub.onSubmit = nil // they are queued
	running := user.execute(hello, "Prefer", "respond-async").want(202, "")
	reader.execute(hello, "Prefer", "respond-async").want(202, "")
	h.stub.finish(running.trace(), proto.Exited(0))
}

// A quota bounds what programs write to the disk of a worker, which is the operator's.
func TestVolumeSizeIsLimited(t *testing.T) {
	h, _ := newVolumeHarness(t)
	h.server.MaxVolume = 1 << 20
	h.remount()
	for _, answer := range []*reply{
		h.do("POST", connections, `{"slug":"new","kind":"volume","bytes":"2MiB"}`),
		h.do("PUT", connections+"/work", volumeWork),
		h.do("POST", connections+"/work/fork", `{"slug":"fork"}`),
	} {
		answer.want(400, "validation_error", "bytes", "2MiB", "1MiB", "--max-volume-size")
	}
	h.do("PUT", connections+"/work", `{"kind":"volume","bytes":"1MiB"}`).want(200, "")
	h.do("POST", connections+"/work/fork", `{"slug":"fork"}`).want(201, "")
}
