package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// imageStub is a registry of images in memory. It accepts every body except "bad". Those that profiles can
// name are in the other registry.
type imageStub struct {
	*registry
	images []proto.Image
}

func (s *imageStub) Put(_ context.Context, name, digest string, body io.Reader) (*proto.Image, bool, error) {
	b, err := io.ReadAll(body)
	switch {
	case err != nil:
		return nil, false, fmt.Errorf("read: %w", err)
	case string(b) == "bad":
		return nil, false, &proto.FieldError{Field: "body", Message: "body is no image"}
	case string(b) == "full":
		return nil, false, &proto.Rejection{Reason: proto.RejectedUnavailable}
	}
	img := proto.Image{
		Name: name, Digest: digest, Size: int64(len(b)), UnpackedSize: 3, Languages: map[proto.Language]string{
			proto.Bash: "/bin/bash",
		},
		Env: map[string]string{"LANG": "C"}, CreatedAt: time.Now(),
	}
	for i := range s.images {
		if s.images[i].Name == name {
			s.images[i] = img
			return &img, true, nil
		}
	}
	s.images = append(s.images, img)
	return &img, false, nil
}

func (s *imageStub) List(context.Context) ([]proto.Image, error) { return s.images, nil }

func (s *imageStub) Remove(_ context.Context, name string) (*proto.Image, error) {
	for i, img := range s.images {
		if img.Name == name {
			s.images = append(s.images[:i], s.images[i+1:]...)
			return &img, nil
		}
	}
	return nil, proto.ErrNotFound
}

const digestQuery = "?digest=sha256:adb423b46835f52cf4e01a0a8d8eea76f122296d8332f46d137e615c3cfd223c"

func TestImages(t *testing.T) {
	h := newHarness(t)
	h.server.ImageAdmin = &imageStub{registry: h.registry}
	h.remount()
	if list := h.do("GET", "/v1/admin/images", "").want(200, ""); strings.TrimSpace(
		string(list.body)) != `{"images":[],"next_cursor":null}` {
		t.Errorf("no images: %s", list.body)
	}
	made := h.do("PUT", "/v1/admin/images/py-3.14"+digestQuery, "content").want(201, "").json()
	if made["name"] != "py-3.14" || "?digest="+made["digest"].(string) != digestQuery || made["size"] != 7.0 ||
		made["unpacked_size"] != 3.0 ||
		made["languages"].(map[string]any)["bash"] != "/bin/bash" || made["env"].(map[string]any)["LANG"] != "C" {
		t.Errorf("image %v", made)
	}
	h.do("PUT", "/v1/admin/images/py-3.14"+digestQuery, "other").want(200, "")
	if list := h.do("GET", "/v1/admin/images", "").want(200, "").json()["images"].([]any); len(list) != 1 ||
		list[0].(map[string]any)["size"] != 5.0 {
		t.Errorf("images %v", list)
	}
	execute := h.stub.addKey("acme", "pro", asUser)
	for _, route := range []string{
		"GET /v1/admin/images", "PUT /v1/admin/images/x" + digestQuery,
		"DELETE /v1/admin/images/py-3.14",
	} {
		method, path, _ := strings.Cut(route, " ")
		h.do(method, path, "", "Authorization", "Bearer "+execute).want(403, "forbidden")
		h.do(method, path, "", "Authorization", "").want(401, "unauthorized")
	}
	h.registry.images["py-3.14"] = &proto.Image{Name: "py-3.14"}
	h.do("POST", profilesPath, `{"name":"web","image":"py-3.14"}`).want(201, "")
	h.do("POST", profilesPath, `{"name":"of-the-host","image":"/py-3.14"}`).want(201, "")
	h.do("DELETE", "/v1/admin/images/py-3.14", "").want(409, "conflict", "sandbox web;")
	h.do("PUT", profilesPath+"/web", `{"image":""}`).want(200, "")
	if a := h.do("DELETE", "/v1/admin/images/py-3.14", "").want(200, "").json(); a["name"] != "py-3.14" {
		t.Errorf("removed %v", a)
	}
	h.do("DELETE", "/v1/admin/images/py-3.14", "").want(404, "not_found")
}

func TestImagesThatAreRefused(t *testing.T) {
	h := newHarness(t)
	h.server.ImageAdmin = &imageStub{registry: h.registry}
	h.remount()
	for _, name := range []string{"Py", "-x", "a%20b", strings.Repeat("a", 64), "%2e%2e", "a%2fb"} {
		h.do("PUT", "/v1/admin/images/"+name+digestQuery, "x").want(400, "validation_error", "name")
	}
	for _, query := range []string{
		"", "?digest=", "?digest=sha256:00", strings.ToUpper(digestQuery),
		strings.Replace(digestQuery, "sha256", "sha512", 1),
	} {
		h.do("PUT", "/v1/admin/images/x"+query, "x").want(400, "validation_error", "digest")
	}
	h.do("PUT", "/v1/admin/images/x"+digestQuery, "bad").want(400, "validation_error", "body is no image")
	h.do("PUT", "/v1/admin/images/x"+digestQuery, "full").want(503, "service_unavailable")
	h.do("PUT", "/v1/admin/images/x"+digestQuery, "x", "Content-Encoding", "zstd").want(415, "unsupported_media_type")
	// One byte above the limit, announced.
	h.client.Transport.(*http.Transport).ExpectContinueTimeout = time.Hour // the answer comes before the body is sent
	r := h.request("PUT", "/v1/admin/images/x"+digestQuery, "")
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader("x")), proto.MaxImageBytes+1
	r.Header.Set("Expect", "100-continue")
	r.Proto = "HTTP/1.1"
	if resp, err := h.client.Do(r); err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("%v, %v", resp, err)
	} else if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
}

// An image may take longer than a JSON body, as long as data keeps arriving.
func TestSlowImage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.server.ImageAdmin = &imageStub{registry: h.registry}
		h.remount()
		for stall, status := range map[time.Duration]int{
			web.BodyTimeout - time.Second: 201, web.BodyTimeout + time.Second: 408,
		} {
			body, in := io.Pipe()
			var sent sync.WaitGroup
			sent.Go(func() {
				for range 4 {
					time.Sleep(stall)
					if _, err := io.WriteString(in, "x"); err != nil {
						return
					}
				}
				_ = in.Close()
			})
			r := h.request("PUT", "/v1/admin/images/x"+digestQuery, "")
			r.Body, r.ContentLength = body, -1
			resp, err := h.client.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != status {
				t.Errorf("stalling %s: %s, want %d", stall, resp.Status, status)
			}
			_ = errors.Join(resp.Body.Close(), body.Close())
			sent.Wait()
			h.server.ImageAdmin = &imageStub{registry: h.registry}
			h.remount()
		}
		h.client.CloseIdleConnections()
	})
}
