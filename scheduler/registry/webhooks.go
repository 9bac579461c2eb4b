package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	settingsPrefix  = "key."
	endpointPrefix  = "url."
	endpointHashLen = 40
	// maxEndpoints is how many failing or disabled URLs of an organisation are kept: one may name another URL in every execution.
	maxEndpoints = 1000
)

// Webhooks keeps the webhook settings of API keys, and the URLs at which deliveries fail, of each organisation by itself. It is kept
// current by a watch. Run must be running for changes to be seen.
type Webhooks struct {
	store   *store.Store
	log     *slog.Logger
	watched watched

	mu        sync.RWMutex
	settings  map[string]known[proto.Webhook]             // by the API key's id
	endpoints map[string]map[string]known[proto.Endpoint] // by organisation and name in the bucket
	seen      uint64                                      // the last revision that the watch told
}

// known is a value as it was last seen in the bucket.
type known[T any] struct {
	value    *T // nil where it was removed here, and the watch does not know yet
	revision uint64
}

// learn takes in what is stored under a name; value is nil for what is removed. Something newer stays: the watch may tell late of what
// was changed here.
func learn[T any](m map[string]known[T], name string, value *T, revision uint64) {
	switch {
	case m[name].revision >= revision:
	case value == nil:
		delete(m, name)
	default:
		m[name] = known[T]{value, revision}
	}
}

// OpenWebhooks reads the settings and endpoints there are.
func OpenWebhooks(ctx context.Context, st *store.Store, log *slog.Logger) (*Webhooks, error) {
	w := &Webhooks{
		store: st, log: log, settings: map[string]known[proto.Webhook]{}, endpoints: map[string]map[string]known[proto.Endpoint]{},
	}
	w.watched = watched{store: st, bucket: st.Webhooks, pattern: ">", what: "webhook settings", log: log, take: w.take}
	return w, w.watched.read(ctx)
}

// Run keeps them current until ctx ends.
func (w *Webhooks) Run(ctx context.Context) error { return w.watched.run(ctx) }

// take takes in one entry of the bucket. One that cannot be read changes nothing.
func (w *Webhooks) take(e jetstream.KeyValueEntry) {
	if err := w.takeEntry(e); err != nil {
		w.log.Error("a malformed entry of the webhook settings was passed over", "key", e.Key(), "error", err)
	}
}

func (w *Webhooks) takeEntry(e jetstream.KeyValueEntry) (err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = max(w.seen, e.Revision())
	put := e.Operation() == jetstream.KeyValuePut
	if key, ok := strings.CutPrefix(e.Key(), settingsPrefix); ok {
		var value *proto.Webhook
		if put {
			if value, err = decodeSettings(e); err != nil {
				return err
			}
		}
		learn(w.settings, key, value, e.Revision())
		return nil
	}
	name, ok := strings.CutPrefix(e.Key(), endpointPrefix)
	org, _, has := strings.Cut(name, ".")
	if !ok || !has {
		return errors.New("its name is not known")
	}
	var value *proto.Endpoint
	if put {
		if value, err = decodeEndpoint(org, e); err != nil {
			return err
		}
	}
	w.learnEndpoint(org, e.Key(), value, e.Revision())
	return nil
}

// wrote calls f to take in what was written here, at once; others learn of it by their watch. What the watch here has passed already it
// has told of, or of what came of it since.
func (w *Webhooks) wrote(revision uint64, f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if revision > w.seen {
		f()
	}
}

func (w *Webhooks) learnEndpoint(org, name string, value *proto.Endpoint, revision uint64) {
	if w.endpoints[org] == nil {
		w.endpoints[org] = map[string]known[proto.Endpoint]{}
	}
	if learn(w.endpoints[org], name, value, revision); len(w.endpoints[org]) == 0 {
		delete(w.endpoints, org)
	}
}

// decodeSettings reads stored settings. What an older version did not store yet is as in the default.
func decodeSettings(e jetstream.KeyValueEntry) (*proto.Webhook, error) {
	s := proto.DefaultWebhook()
	err := json.Unmarshal(e.Value(), &s)
	if err == nil && (s.MaxAttempts < 1 || len(s.Waits) == 0 || s.Timeout <= 0) {
		err = fmt.Errorf("%d attempts, %d waits, a timeout of %v", s.MaxAttempts, len(s.Waits), time.Duration(s.Timeout))
	}
	if err != nil {
		return nil, fmt.Errorf("decode webhook settings %s: %w: remove them and set them again", e.Key(), err)
	}
	return &s, nil
}

func decodeEndpoint(org string, e jetstream.KeyValueEntry) (*proto.Endpoint, error) {
	var p proto.Endpoint
	err := json.Unmarshal(e.Value(), &p)
	if err == nil && endpointKey(org, p.URL) != e.Key() {
		err = errors.New("it is of another URL")
	}
	if err != nil {
		return nil, fmt.Errorf("decode webhook endpoint %s: %w", e.Key(), err)
	}
	return &p, nil
}

// Webhook gives the settings of an API key as they are known here; the default where none are.
func (w *Webhooks) Webhook(key string) proto.Webhook {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if s := w.settings[key].value; s != nil {
		return cloneSettings(s)
	}
	return proto.DefaultWebhook()
}

func cloneSettings(s *proto.Webhook) proto.Webhook {
	c := *s
	c.Waits, c.SignatureHeaders = slices.Clone(s.Waits), slices.Clone(s.SignatureHeaders)
	return c
}

// Stored gives the settings of an API key as they are in the bucket. Its error is [proto.ErrNotFound] where there are none.
func (w *Webhooks) Stored(ctx context.Context, key string) (proto.Webhook, error) {
	s, _, err := w.stored(ctx, key)
	if err != nil {
		return proto.Webhook{}, err
	}
	return *s, nil
}

func (w *Webhooks) stored(ctx context.Context, key string) (*proto.Webhook, uint64, error) {
	e, err := w.store.Webhooks.Get(ctx, settingsPrefix+key)
	if store.IsNotFound(err) {
		return nil, 0, fmt.Errorf("webhook settings of %s: %w", key, proto.ErrNotFound)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("read webhook settings of %s: %w", key, err)
	}
	s, err := decodeSettings(e)
	return s, e.Revision(), err
}

// Change stores what f makes of the settings of an API key, which are nil where there are none, and gives it. f is called again when
// somebody else changes them meanwhile; its error is given as it is.
func (w *Webhooks) Change(ctx context.Context, key string, f func(old *proto.Webhook) (proto.Webhook, error)) (proto.Webhook, error) {
	for range changeTries {
		old, revision, err := w.stored(ctx, key)
		if err != nil && !errors.Is(err, proto.ErrNotFound) {
			return proto.Webhook{}, err
		}
		s, err := f(old)
		if err != nil {
			return proto.Webhook{}, err
		}
		s.UpdatedAt = time.Now().UTC()
		body, err := json.Marshal(s) //nolint:gosec // this is where the secret is kept
		if err != nil {
			return proto.Webhook{}, fmt.Errorf("encode webhook settings of %s: %w", key, err)
		}
		if old == nil {
			revision, err = w.store.Webhooks.Create(ctx, settingsPrefix+key, body)
		} else {
			revision, err = w.store.Webhooks.Update(ctx, settingsPrefix+key, body, revision)
		}
		if store.IsConflict(err) || errors.Is(err, jetstream.ErrKeyExists) {
			continue
		}
		if err != nil {
			return proto.Webhook{}, fmt.Errorf("store webhook settings of %s: %w", key, err)
		}
		kept := cloneSettings(&s)
		w.wrote(revision, func() { learn(w.settings, key, &kept, revision) })
		return s, nil
	}
	return proto.Webhook{}, fmt.Errorf("change webhook settings of %s: %w", key, proto.ErrConflict)
}

// Remove removes the settings of an API key, those that cannot be read too. Its error is [proto.ErrNotFound] where there are none.
func (w *Webhooks) Remove(ctx context.Context, key string) error {
	e, err := w.remove(ctx, settingsPrefix+key)
	if err != nil {
		return fmt.Errorf("remove webhook settings of %s: %w", key, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	forget(w.settings, key, e.Revision())
	return nil
}

// remove removes an entry and gives it as it was.
func (w *Webhooks) remove(ctx context.Context, name string) (jetstream.KeyValueEntry, error) {
	for range changeTries {
		e, err := w.store.Webhooks.Get(ctx, name)
		if store.IsNotFound(err) {
			return nil, proto.ErrNotFound
		}
		if err != nil {
			return nil, err
		}
		// A mark of the removal stays for some time, for who was away meanwhile.
		err = w.store.Webhooks.Purge(ctx, name, jetstream.LastRevision(e.Revision()), jetstream.PurgeTTL(store.WebhookMarkerTTL))
		if !store.IsConflict(err) {
			return e, err
		}
	}
	return nil, proto.ErrConflict
}

// forget makes what was removed at revision unknown here, until the watch tells of its removal.
func forget[T any](m map[string]known[T], name string, revision uint64) {
	if old, ok := m[name]; ok && old.revision <= revision {
		m[name] = known[T]{nil, revision}
	}
}

// endpointKey is where an endpoint lies in the bucket.
func endpointKey(org, target string) string {
	sum := sha256.Sum256([]byte(target))
	return endpointPrefix + org + "." + hex.EncodeToString(sum[:])[:endpointHashLen]
}

// Endpoint gives what is known here of a URL that an organisation's deliveries fail at; ok is false where they do not.
func (w *Webhooks) Endpoint(org, target string) (p proto.Endpoint, ok bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if value := w.endpoints[org][endpointKey(org, target)].value; value != nil {
		return *value, true
	}
	return proto.Endpoint{}, false
}

// Endpoints gives those of an organisation, the one that has failed longest first.
func (w *Webhooks) Endpoints(org string) []proto.Endpoint {
	w.mu.RLock()
	defer w.mu.RUnlock()
	list := make([]proto.Endpoint, 0, len(w.endpoints[org]))
	for _, p := range w.endpoints[org] {
		if p.value != nil {
			list = append(list, *p.value)
		}
	}
	slices.SortFunc(list, func(a, b proto.Endpoint) int {
		if order := a.FailingSince.Compare(b.FailingSince); order != 0 {
			return order
		}
		return strings.Compare(a.URL, b.URL)
	})
	return list
}

// Failing records that deliveries to a URL fail since that time; where an earlier one is recorded, that stays. Of each organisation the
// last 1,000 such URLs are kept.
func (w *Webhooks) Failing(ctx context.Context, org, target string, at time.Time) error {
	if _, ok := w.Endpoint(org, target); ok {
		return nil
	}
	err := w.createEndpoint(ctx, org, &proto.Endpoint{URL: target, FailingSince: at.UTC()})
	if errors.Is(err, jetstream.ErrKeyExists) {
		return nil
	}
	return err
}

// createEndpoint stores an endpoint of which there is nothing yet.
func (w *Webhooks) createEndpoint(ctx context.Context, org string, p *proto.Endpoint) error {
	if err := w.makeRoom(ctx, org); err != nil {
		return err
	}
	return w.writeEndpoint(org, p, func(name string, body []byte) (uint64, error) { return w.store.Webhooks.Create(ctx, name, body) })
}

func (w *Webhooks) writeEndpoint(org string, p *proto.Endpoint, write func(name string, body []byte) (uint64, error)) error {
	body, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode webhook endpoint of %s: %w", org, err)
	}
	name := endpointKey(org, p.URL)
	revision, err := write(name, body)
	if err != nil {
		return fmt.Errorf("store webhook endpoint %s: %w", name, err)
	}
	w.wrote(revision, func() { w.learnEndpoint(org, name, p, revision) })
	return nil
}

// makeRoom drops what has failed longest of an organisation that has too many endpoints, disabled ones last.
func (w *Webhooks) makeRoom(ctx context.Context, org string) error {
	list := w.Endpoints(org)
	if len(list) < maxEndpoints {
		return nil
	}
	oldest := list[0]
	if i := slices.IndexFunc(list, func(p proto.Endpoint) bool { return !p.Disabled() }); i >= 0 {
		oldest = list[i]
	}
	w.log.Warn("too many webhook URLs of an organisation fail: the one that has failed longest is forgotten", "org", org,
		"endpoint", endpointKey(org, oldest.URL), "host", hostOf(oldest.URL), "disabled", oldest.Disabled())
	if err := w.Enable(ctx, org, oldest.URL); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return nil
}

// Disable records that nothing is delivered to a URL any more, and why; where that is recorded already, it stays.
func (w *Webhooks) Disable(ctx context.Context, org, target, reason string, at time.Time) error {
	name := endpointKey(org, target)
	for range changeTries {
		p := &proto.Endpoint{URL: target, FailingSince: at.UTC(), DisabledAt: at.UTC(), Reason: reason}
		e, err := w.store.Webhooks.Get(ctx, name)
		switch {
		case store.IsNotFound(err):
			err = w.createEndpoint(ctx, org, p)
		case err != nil:
			return fmt.Errorf("read webhook endpoint %s: %w", name, err)
		default:
			old, decodeErr := decodeEndpoint(org, e)
			if decodeErr == nil && old.Disabled() {
				return nil
			}
			if decodeErr == nil {
				p.FailingSince = old.FailingSince
			}
			err = w.writeEndpoint(org, p, func(name string, body []byte) (uint64, error) {
				return w.store.Webhooks.Update(ctx, name, body, e.Revision())
			})
		}
		if store.IsConflict(err) || errors.Is(err, jetstream.ErrKeyExists) {
			continue
		}
		if err == nil {
			w.log.Warn("a webhook URL is disabled", "org", org, "endpoint", name, "host", hostOf(target), "reason", reason)
		}
		return err
	}
	return fmt.Errorf("disable webhook endpoint %s: %w", name, proto.ErrConflict)
}

// Enable forgets that deliveries to a URL fail, or go there no more. Its error is [proto.ErrNotFound] where neither is recorded.
func (w *Webhooks) Enable(ctx context.Context, org, target string) error {
	name := endpointKey(org, target)
	e, err := w.remove(ctx, name)
	if err != nil {
		return fmt.Errorf("enable webhook endpoint %s: %w", name, err)
	}
	w.mu.Lock()
	forget(w.endpoints[org], name, e.Revision())
	w.mu.Unlock()
	if old, err := decodeEndpoint(org, e); err == nil && old.Disabled() {
		w.log.Info("a webhook URL is enabled again", "org", org, "endpoint", name, "host", hostOf(target))
	}
	return nil
}

// hostOf is what a log may say of a URL: its path and query may be secrets.
func hostOf(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return ""
	}
	return u.Host
}
