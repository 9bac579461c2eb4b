package api

import (
	"errors"
	"testing"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

func TestFileRequests(t *testing.T) {
	thread := FileRequest{proto.SourceThread, "t"}
	list, err := Decode[FileListRequest]([]byte(`{"source":"thread","id":"t","path":"a","recursive":true}`))
	if err != nil || *list != (FileListRequest{FileRequest: thread, Path: "a", Recursive: true}) {
		t.Errorf("%+v, %v", list, err)
	}
	upload, err := Decode[FileUploadRequest](
		[]byte(`{"source":"thread","id":"t","path":"a","content_length":10737418240,"content_type":"text/plain"}`))
	if err != nil || upload.FileRequest != thread || upload.Path != "a" || upload.ContentLength != proto.MaxFileBytes {
		t.Errorf("%+v, %v", upload, err)
	}
	if volume, err := Decode[FileDownloadRequest]([]byte(`{"source":"volume","id":"a.slug","path":"a"}`)); err != nil ||
		volume.Source != proto.SourceVolume {
		t.Errorf("%+v, %v", volume, err)
	}
	for kind, fields := range map[string]map[string]string{
		"list": {
			``: "body", `{"id":"t"}`: "source", `{"source":"disk","id":"t"}`: "source", `{"source":"thread","id":null}`: "id",
			`{"source":"thread","id":"-t"}`: "id", `{"source":"thread","id":"t","path":1}`: "path",
			`{"source":"thread","id":"t","recursive":"yes"}`: "recursive",
		},
		"download": {`{"source":"thread","id":"t"}`: "path"},
		"upload": {
			`{"source":"thread","id":"t","path":"a"}`:                                     "content_length",
			`{"source":"thread","id":"t","path":"a","content_length":-1}`:                 "content_length",
			`{"source":"thread","id":"t","path":"a","content_length":1.5}`:                "content_length",
			`{"source":"thread","id":"t","path":"a","content_length":10737418241}`:        "content_length",
			`{"source":"thread","id":"t","path":"a","content_length":1,"content_type":2}`: "content_type",
		},
	} {
		request := map[string]any{
			"list": new(FileListRequest), "download": new(FileDownloadRequest),
			"upload": new(FileUploadRequest),
		}[kind]
		for body, want := range fields {
			if field, ok := errors.AsType[*proto.FieldError](decodeInto(request, []byte(body))); !ok || field.Field != want {
				t.Errorf("%s %s: %v", kind, body, field)
			}
		}
	}
}

func TestThreadRequests(t *testing.T) {
	if f, err := Decode[ForkRequest]([]byte(`{"id":"new","version":3}`)); err != nil || *f != (ForkRequest{"new", 3}) {
		t.Errorf("%+v, %v", f, err)
	}
	if f, err := Decode[ForkRequest]([]byte(`{"id":"new","version":null}`)); err != nil || *f != (ForkRequest{"new", 0}) {
		t.Errorf("%+v, %v", f, err)
	}
	for _, body := range []string{`{}`, `{"id":"_"}`, `{"id":"a","version":0}`, `{"id":"a","version":"1"}`} {
		if f, err := Decode[ForkRequest]([]byte(body)); err == nil {
			t.Errorf("%s is %+v", body, f)
		}
	}
	for body, want := range map[string]time.Duration{
		`{}`: proto.DefaultSafeAge, `{"safe_age":7200}`: proto.MinSafeAge, `{"safe_age":7200.5}`: proto.MinSafeAge +
			500*time.Millisecond,
	} {
		if r, err := Decode[CollectRequest]([]byte(body)); err != nil || time.Duration(r.SafeAge) != want {
			t.Errorf("%s is %+v, %v", body, r, err)
		}
	}
	for _, body := range []string{`{"safe_age":0}`, `{"safe_age":7199}`, `{"safe_age":"1h"}`, `{"safeage":1}`, ``} {
		if r, err := Decode[CollectRequest]([]byte(body)); err == nil {
			t.Errorf("%s is %+v", body, r)
		}
	}
}
