package registry

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	settingsPrefix  = "key."
	endpointPrefix  = "url."
	endpointHashLen = 40
	// maxEndpoints bounds the failing or disabled URLs of an organisation that are stored. Every
	// execution may name another URL.
	maxEndpoints = 1000
)

// Webhooks stores the webhook settings of API keys and, for each organisation, the URLs at which
// deliveries fail. Run must be running for changes to be seen.
type Webhooks struct {
	log       *slog.Logger
	ring      *keyring.Keyring
	settings  *store.Collection[proto.Webhook]
	endpoints *store.Collection[proto.Endpoint]
	byOrg     map[string]map[string]*proto.Endpoint // by organisation and key; guarded by the lock of endpoints
}

// OpenWebhooks reads all settings and endpoints. It encrypts signing secrets that an earlier
// version stored, if ring has a key.
func OpenWebhooks(ctx context.Context, st *store.Store, ring *keyring.Keyring, log *slog.Logger) (*Webhooks, error) {
	w := &Webhooks{log: log, ring: ring, byOrg: map[string]map[string]*proto.Endpoint{}}
	var err error
	if w.settings, err = store.OpenCollection(ctx, store.CollectionConfig[proto.Webhook]{
		Store: st, Bucket: st.Webhooks, Keys: settingsPrefix + "*.*", Name: "webhook settings",
		Decode: func(e jetstream.KeyValueEntry) (*proto.Webhook, error) { return w.decodeSettings(ctx, e) },
		Encode: w.encodeSettings, Log: log,
	}); err != nil {
		return nil, err
	}
	if err := w.sealSettings(ctx, st); err != nil {
		return nil, err
	}
	w.endpoints, err = store.OpenCollection(ctx, store.CollectionConfig[proto.Endpoint]{
		Store: st, Bucket: st.Webhooks, Keys: endpointPrefix + "*.*", Name: "webhook endpoints", Decode: decodeEndpoint,
		OnChange: w.index, Log: log,
	})
	return w, err
}

// Run applies changes by other processes until ctx is done.
func (w *Webhooks) Run(ctx context.Context) error {
	var endpoints sync.WaitGroup
	endpoints.Go(func() { _ = w.endpoints.Run(ctx) }) // it always returns nil
	defer endpoints.Wait()
	return w.settings.Run(ctx)
}

// index updates byOrg when the cache changes.
func (w *Webhooks) index(key string, _, current *proto.Endpoint) {
	org := endpointOrg(key)
	if current == nil {
		if delete(w.byOrg[org], key); len(w.byOrg[org]) == 0 {
			delete(w.byOrg, org)
		}
		return
	}
	if w.byOrg[org] == nil {
		w.byOrg[org] = map[string]*proto.Endpoint{}
	}
	w.byOrg[org][key] = current
}

// storedSettings are the settings of an API key as stored. The secrets are in Sealed, or in Webhook
// without a key of secrets.
type storedSettings struct {
	proto.Webhook
	Sealed []byte `json:"sealed,omitempty"`
}

// signingSecrets are the encrypted part of storedSettings.
type signingSecrets struct {
	Current string `json:"current,omitempty"`
	Old     string `json:"old,omitempty"`
}

// sealName is the name with which the secrets of an API key are encrypted.
func sealName(entry string) string { return "webhook." + entry }

func (w *Webhooks) encodeSettings(ctx context.Context, key string, value *proto.Webhook) (body []byte, err error) {
	s := storedSettings{Webhook: *value}
	if w.ring.Enabled() && (s.Secret != "" || s.OldSecret != "") {
		secrets, err := json.Marshal(signingSecrets{s.Secret, s.OldSecret})
		if err != nil {
			return nil, err
		}
		if s.Sealed, err = w.ring.Seal(ctx, sealName(key), secrets); err != nil {
			return nil, err
		}
		s.Secret, s.OldSecret = "", ""
	}
	return json.Marshal(s)
}

// decodeSettings decodes stored settings. Fields that an older version did not store have their
// default values.
func (w *Webhooks) decodeSettings(ctx context.Context, e jetstream.KeyValueEntry) (*proto.Webhook, error) {
	s := storedSettings{Webhook: proto.DefaultWebhook()}
	err := json.Unmarshal(e.Value(), &s)
	if err == nil && (s.MaxAttempts < 1 || len(s.Waits) == 0 || s.Timeout <= 0) {
		err = fmt.Errorf("%d attempts, %d waits, a timeout of %v", s.MaxAttempts, len(s.Waits), time.Duration(s.Timeout))
	}
	if err != nil {
		return nil, fmt.Errorf("decode webhook settings %s: %w: remove them and set them again", e.Key(), err)
	}
	if s.Sealed == nil {
		return &s.Webhook, nil
	}
	var secrets signingSecrets
	text, err := w.ring.Open(ctx, sealName(e.Key()), s.Sealed)
	if err == nil {
		err = json.Unmarshal(text, &secrets)
	}
	if err != nil {
		return nil, fmt.Errorf("decrypt the secrets of webhook settings %s: %w", e.Key(), err)
	}
	s.Secret, s.OldSecret = secrets.Current, secrets.Old
	return &s.Webhook, nil
}

// sealSettings encrypts the secrets that are stored without encryption.
func (w *Webhooks) sealSettings(ctx context.Context, st *store.Store) error {
	if !w.ring.Enabled() {
		return nil
	}
	var open []string
	err := store.ReadBucket(ctx, st.Webhooks, settingsPrefix+"*.*", func(e jetstream.KeyValueEntry) {
		var s storedSettings
		if e.Operation() == jetstream.KeyValuePut && json.Unmarshal(e.Value(), &s) == nil &&
			(s.Secret != "" || s.OldSecret != "") {
			open = append(open, e.Key())
		}
	})
	for _, key := range open {
		if err != nil {
			break
		}
		_, err = w.settings.Update(ctx, key, func(old *proto.Webhook) (*proto.Webhook, error) { return old, nil })
	}
	if err != nil {
		return fmt.Errorf("encrypt the secrets of webhooks: %w", err)
	}
	return nil
}

func decodeEndpoint(e jetstream.KeyValueEntry) (*proto.Endpoint, error) {
	var p proto.Endpoint
	err := json.Unmarshal(e.Value(), &p)
	if err == nil && endpointKey(endpointOrg(e.Key()), p.URL) != e.Key() {
		err = errors.New("it is of another URL")
	}
	if err != nil {
		return nil, fmt.Errorf("decode webhook endpoint %s: %w", e.Key(), err)
	}
	return &p, nil
}

// settingsKey returns the key of the settings of an API key in the bucket.
func settingsKey(org, key string) string { return settingsPrefix + org + "." + key }

// Webhook returns the settings of an API key, or the default ones if none are stored.
func (w *Webhooks) Webhook(org, key string) proto.Webhook {
	if s := w.settings.Get(settingsKey(org, key)); s != nil {
		return cloneSettings(s)
	}
	return proto.DefaultWebhook()
}

func cloneSettings(s *proto.Webhook) proto.Webhook {
	c := *s
	c.Waits, c.SignatureHeaders = slices.Clone(s.Waits), slices.Clone(s.SignatureHeaders)
	return c
}

// Stored reads the settings of an API key from the bucket. It returns [proto.ErrNotFound] if there
// are none.
func (w *Webhooks) Stored(ctx context.Context, org, key string) (proto.Webhook, error) {
	s, _, err := w.settings.Read(ctx, settingsKey(org, key))
	if err != nil {
		return proto.Webhook{}, err
	}
	return *s, nil
}

// Change replaces an API key's settings by the result of change, and returns it. change is called
// with nil if there are none, and possibly again. Its error is returned unchanged.
func (w *Webhooks) Change(
	ctx context.Context, org, key string, change func(old *proto.Webhook) (proto.Webhook, error),
) (proto.Webhook, error) {
	s, err := w.settings.Update(ctx, settingsKey(org, key), func(old *proto.Webhook) (*proto.Webhook, error) {
		changed, err := change(old)
		changed.UpdatedAt = time.Now().UTC()
		changed = cloneSettings(&changed)
		return &changed, err
	})
	if err != nil {
		return proto.Webhook{}, err
	}
	return cloneSettings(s), nil
}

// Remove removes the settings of an API key, malformed ones too. It returns [proto.ErrNotFound] if
// there are none.
func (w *Webhooks) Remove(ctx context.Context, org, key string) error {
	_, err := w.settings.Remove(ctx, settingsKey(org, key), nil)
	return err
}

// endpointKey returns the key of an endpoint in the bucket.
func endpointKey(org, target string) string {
	sum := sha256.Sum256([]byte(target))
	return endpointPrefix + org + "." + hex.EncodeToString(sum[:])[:endpointHashLen]
}

// endpointOrg returns the organisation in the key of an endpoint.
func endpointOrg(key string) string {
	org, _, _ := strings.Cut(strings.TrimPrefix(key, endpointPrefix), ".")
	return org
}

// Endpoint returns the state of a URL of an organisation. ok is false if deliveries to it do not
// fail.
func (w *Webhooks) Endpoint(org, target string) (p proto.Endpoint, ok bool) {
	if found := w.endpoints.Get(endpointKey(org, target)); found != nil {
		return *found, true
	}
	return proto.Endpoint{}, false
}

// Endpoints returns the endpoints of an organisation, those failing longest first.
func (w *Webhooks) Endpoints(org string) []proto.Endpoint {
	list := []proto.Endpoint{}
	w.endpoints.View(func() {
		for p := range maps.Values(w.byOrg[org]) {
			list = append(list, *p)
		}
	})
	slices.SortFunc(list, func(a, b proto.Endpoint) int {
		return cmp.Or(a.FailingSince.Compare(b.FailingSince), strings.Compare(a.URL, b.URL))
	})
	return list
}

// Failing records that deliveries to a URL have failed since a time, unless an earlier time is
// recorded. It keeps at most 1,000 such URLs of an organisation.
func (w *Webhooks) Failing(ctx context.Context, org, target string, at time.Time) error {
	if _, ok := w.Endpoint(org, target); ok {
		return nil
	}
	if err := w.evictEndpoint(ctx, org); err != nil {
		return err
	}
	err := w.endpoints.Create(ctx, endpointKey(org, target), &proto.Endpoint{URL: target, FailingSince: at.UTC()})
	if errors.Is(err, proto.ErrExists) {
		return nil
	}
	return err
}

// evictEndpoint removes an endpoint of an organisation with too many: the one failing longest,
// preferably one that is not disabled.
func (w *Webhooks) evictEndpoint(ctx context.Context, org string) error {
	list := w.Endpoints(org)
	if len(list) < maxEndpoints {
		return nil
	}
	oldest := list[0]
	if i := slices.IndexFunc(list, func(p proto.Endpoint) bool { return !p.Disabled() }); i >= 0 {
		oldest = list[i]
	}
	w.log.Warn("too many failing webhook URLs: oldest removed", "org", org,
		"endpoint", endpointKey(org, oldest.URL), "host", hostOf(oldest.URL), "disabled", oldest.Disabled())
	if err := w.Enable(ctx, org, oldest.URL); err != nil && !errors.Is(err, proto.ErrNotFound) {
		return err
	}
	return nil
}

// Disable records that deliveries to a URL stop, and why. An already disabled URL is left alone.
func (w *Webhooks) Disable(ctx context.Context, org, target, reason string, at time.Time) error {
	name, disabled := endpointKey(org, target), false
	err := store.Update(ctx, func() error {
		p := &proto.Endpoint{URL: target, FailingSince: at.UTC(), DisabledAt: at.UTC(), Reason: reason}
		e, err := w.endpoints.Entry(ctx, name)
		if errors.Is(err, proto.ErrNotFound) {
			if err := w.evictEndpoint(ctx, org); err != nil {
				return err
			}
			disabled = true
			return w.endpoints.Create(ctx, name, p)
		}
		if err != nil {
			return err
		}
		if old, err := decodeEndpoint(e); err == nil { // else it is replaced
			if disabled = !old.Disabled(); !disabled {
				return nil
			}
			p.FailingSince = old.FailingSince
		}
		disabled = true
		_, err = w.endpoints.Replace(ctx, name, p, e.Revision())
		return err
	})
	if err == nil && disabled {
		w.log.Warn("webhook URL disabled", "org", org, "endpoint", name, "host", hostOf(target), "reason", reason)
	}
	return err
}

// Enable clears a URL's failures and disablement. It returns [proto.ErrNotFound] if neither is
// recorded.
func (w *Webhooks) Enable(ctx context.Context, org, target string) error {
	name := endpointKey(org, target)
	old, err := w.endpoints.Remove(ctx, name, nil)
	if err != nil {
		return err
	}
	if old != nil && old.Disabled() {
		w.log.Info("webhook URL enabled", "org", org, "endpoint", name, "host", hostOf(target))
	}
	return nil
}

// hostOf returns the part of a URL that may be logged: its path and query may be secrets.
func hostOf(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return ""
	}
	return u.Host
}
