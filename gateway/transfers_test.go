package gateway

import (
	"context"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
)

// The memory of all uploads together is limited.
func TestUploadMemoryIsLimited(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		const size = 1 << 20
		h.server.Memory = web.OrgShare * 2 * web.UploadMemory(size)
		var uploads []*io.PipeWriter
		var answers []<-chan *reply
		for range 2 {
			body, in := io.Pipe()
			r := h.put(h.server.signedPut("b", size), "")
			r.Body, r.ContentLength = body, size
			uploads, answers = append(uploads, in), append(answers, h.begin(r))
			go func() { _, _ = in.Write(make([]byte, size-1)) }()
		}
		synctest.Wait()
		a := h.send(h.put(h.server.signedPut("c", 1), "x")).want(503, "service_unavailable", "too many requests are open")
		if a.header.Get("Retry-After") != "1" {
			t.Errorf("refused with %v", a.header)
		}
		for i, in := range uploads {
			_, _ = io.WriteString(in, "x")
			_ = in.Close()
			(<-answers[i]).want(200, "")
		}
		h.send(h.put(h.server.signedPut("c", 1), "x")).want(200, "")
		synctest.Wait()
		h.checkNothingHeld()
	})
}

// One organisation's transfers delay only its own further transfers.
func TestTransfersOfAnOrganisation(t *testing.T) {
	bubble(t, func(t *testing.T, h *harness) {
		h.threads.files["acme/t/a"], h.threads.files["other/t/a"] = []byte("hello"), []byte("theirs")
		h.addThread("acme", "t")
		h.stub.addKey("other", "pro", asUser)
		var uploads []*io.PipeWriter
		var answers []<-chan *reply
		for range web.MaxTransfers {
			body, in := io.Pipe()
			r := h.put(h.server.signedPut("b", 2), "")
			r.Body, r.ContentLength = body, 2
			uploads, answers = append(uploads, in), append(answers, h.begin(r))
			go func() { _, _ = io.WriteString(in, "1") }()
		}
		synctest.Wait()
		content := func(org, method string) *grant {
			id := map[string]string{"acme": "key_1", "other": "key_2"}[org]
			return &grant{
				method: method, key: id, org: org, source: proto.SourceThread, id: "t", path: "a", size: 2,
				expiresAt: time.Now().Add(time.Hour),
			}
		}
		down := contentPath + content("acme", "GET").token(*h.server.URLSecret)
		start := time.Now()
		if a := h.get(down).want(429, "rate_limited", "on their way"); a.header.Get("Retry-After") != "1" ||
			time.Since(start) != web.TransferWait {
			t.Errorf("refused after %s: %v", time.Since(start), a.header)
		}
		h.send(h.put(h.server.signedPut("c", 1), "x")).want(429, "rate_limited")
		h.do("GET", "/v1/threads/t/archive", "").want(429, "rate_limited")
		h.do("PUT", "/v1/threads/t/archive", "tar").want(429, "rate_limited")
		h.do("POST", "/v1/files/delete", `{"source":"thread","id":"t","path":"a"}`).want(429, "rate_limited")
		h.do("POST", "/v1/files/rename", `{"source":"thread","id":"t","path":"a","to":"b"}`).want(429, "rate_limited")
		h.do("HEAD", down, "", "Authorization", "").want(200, "")
		h.get(contentPath+content("other", "GET").token(*h.server.URLSecret)).want(200, "")

		// A waiting transfer gets the next free slot. A cancelled one gets none.
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			resp, err := h.client.Do(h.request(http.MethodGet, down, "").WithContext(ctx))
			if err == nil {
				err = resp.Body.Close()
			}
			gone <- err
		}()
		synctest.Wait()
		leave()
		if err := <-gone; err == nil {
			t.Error("who left was answered")
		}
		next := h.begin(h.request(http.MethodGet, down, "", "Authorization", ""))
		synctest.Wait()
		finish := func(i int) *reply {
			_, _ = io.WriteString(uploads[i], "2")
			_ = uploads[i].Close()
			return <-answers[i]
		}
		finish(0).want(200, "")
		(<-next).want(200, "")
		for i := 1; i < web.MaxTransfers; i++ {
			finish(i).want(200, "")
		}
		synctest.Wait()
		h.checkNothingHeld()
	})
}
