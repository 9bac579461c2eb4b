package executions

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/gateway/web"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	// streamPath is the prefix of signed URLs of streams.
	streamPath = "/v1/streams/"
	// streamForm is the version of the signed text of a stream.
	streamForm = "bullpen-stream-1"
)

var (
	errBadStream = api.Errorf(
		api.CodeForbidden, "this URL was not made by this server; ask for one at /v1/executions/{id}/stream_url")
	errOldStream = api.Errorf(api.CodeForbidden,
		"this URL has expired, or the API key that asked for it was revoked or lost its scope; ask for another at "+
			"/v1/executions/{id}/stream_url")
)

// streamURL answers with a URL that follows the output of an execution without an API key.
func (s *Routes) streamURL(w http.ResponseWriter, r *web.Request) error {
	record, err := web.ExecutionInPath(r, s.Jobs.Summary)
	if err != nil {
		return err
	}
	base, err := s.BaseURL(r.Request)
	if err != nil {
		return err
	}
	expires := time.Now().Add(web.URLLife).Truncate(time.Second)
	text := strings.Join([]string{
		streamForm, r.Key.ID, string(record.TraceID), strconv.FormatInt(expires.Unix(), 10),
	}, "\n")
	return web.WriteValue(w, http.StatusOK,
		api.StreamURL{URL: base + streamPath + web.SignedText(*s.URLSecret, text), ExpiresAt: api.Time{Time: expires}})
}

// checkStream returns the API key and the execution of a signed URL. It returns errBadStream or
// errOldStream unless the URL and its key are valid.
func (s *Routes) checkStream(ctx context.Context, token string) (*proto.Key, proto.TraceID, error) {
	text, ok := web.VerifyText(*s.URLSecret, token)
	const fields = 4
	parts := strings.Split(text, "\n")
	if !ok || len(parts) != fields || parts[0] != streamForm {
		return nil, "", errBadStream
	}
	expires, err := strconv.ParseInt(parts[3], 10, 64)
	if err != nil {
		return nil, "", fmt.Errorf("parse a signed stream: %w", err)
	}
	if !time.Now().Before(time.Unix(expires, 0)) {
		return nil, "", errOldStream
	}
	key, err := s.keyOfStream(ctx, parts[1])
	return key, proto.TraceID(parts[2]), err
}

// keyOfStream returns the API key of a signed URL if it may follow executions.
func (s *Routes) keyOfStream(ctx context.Context, id string) (*proto.Key, error) {
	key, ok := s.Principals.Principal(id)
	if !ok || !key.Valid(time.Now()) || !key.Has(proto.ScopeRead) {
		return nil, errOldStream
	}
	if _, err := s.Entitlements.Entitlement(ctx, key); err != nil {
		return nil, err
	}
	return key, nil
}

// getStream streams the events of an execution to the EventSource of a browser.
func (s *Routes) getStream(w http.ResponseWriter, r *web.Request) error {
	after, err := web.QueryInt(r, "after_seq", 0, api.MaxWhole, 0)
	if err != nil {
		return err
	}
	after, resumed, err := lastEventID(r, after)
	if err != nil {
		return err
	}
	key, id, err := s.checkStream(r.Context(), chi.URLParam(r.Request, "token"))
	if err != nil {
		return err
	}
	i := r.Info
	i.Key = *key
	if !s.Reserve(i, web.RequestCost) {
		return web.ErrOverloaded
	}
	defer s.Shrink(i, 0)
	ctx, release := s.LimitReads(r.Context(), i)
	defer release()
	r = r.WithContext(ctx)
	record, err := web.Execution(r, id, s.Jobs.Summary)
	if err != nil {
		return err
	}
	if resumed && endedBy(record, after) {
		w.WriteHeader(http.StatusNoContent)
		return nil
	}
	return s.streamOutput(w, r, record, after, true, true, func() error {
		_, err := s.keyOfStream(r.Context(), key.ID)
		return err
	})
}
