// Package store knows what bullpen keeps in JetStream: the streams and buckets, their retention, the subjects, and the form of
// what is stored, bodies too large for a message included. It decides nothing: packages queue, events and registry do.
package store

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Names of the streams and buckets.
const (
	jobsName     = "BULLPEN_JOBS"
	execsName    = "BULLPEN_EXECS"
	outName      = "BULLPEN_OUT"
	deadName     = "BULLPEN_DEAD"
	hooksName    = "BULLPEN_DELIVERIES"
	headsName    = "BULLPEN_THREADS"
	bodiesName   = "bullpen_bodies"
	keysName     = "bullpen_keys"
	profilesName = "bullpen_profiles"
	bindingsName = "bullpen_bindings"
	controlName  = "bullpen_control"
	imagesName   = "bullpen_images"
	webhooksName = "bullpen_webhooks"
)

// BindingTTL is how long an idempotency key stands for its execution, unless the execution's record is kept shorter: a key that
// outlived the record would seem to be unused.
const BindingTTL = 24 * time.Hour

// WebhookMarks is how long the mark of a removed entry of the webhooks' bucket stays: whoever lost touch for longer would not hear of it.
const WebhookMarkerTTL = 7 * 24 * time.Hour

const (
	enterPause   = 250 * time.Millisecond
	enterTimeout = 5 * time.Second // of one request; a cluster may need some of it to agree
)

// A claim-checked body outlives what names it: a record by its retention, a job by the time it may be queued and run.
const (
	bodiesGrace = 24 * time.Hour
	bodiesLeast = 48 * time.Hour
)

// Config says how the streams are kept.
type Config struct {
	Replicas  int           // 1, or 3 or 5 on a cluster
	Retention time.Duration // of records and events
	// Guest opens only what running jobs takes, and waits for another process to make it: a worker, which is near to what it
	// runs, needs no right to change streams or to read API keys.
	AttachOnly bool
	// Restoring opens what a backup is being restored into, which nobody else may.
	Restoring bool
}

// Set is everything bullpen keeps in JetStream.
type Store struct {
	Conn        *nats.Conn
	JS          jetstream.JetStream
	Jobs        jetstream.Stream      // one message per job that is not terminal
	Executions  jetstream.Stream      // one message per execution: claim, then result
	Output      jetstream.Stream      // output events
	DeadLetters jetstream.Stream      // one message per dead letter
	Deliveries  jetstream.Stream      // one message per delivery
	Threads     jetstream.Stream      // one message per thread
	Keys        jetstream.KeyValue    // API keys by id, and the secret they are hashed with
	Profiles    jetstream.KeyValue    // sandbox profiles by name
	Bindings    jetstream.KeyValue    // idempotency keys
	Control     jetstream.KeyValue    // who leads
	Images      jetstream.KeyValue    // the catalog of sandbox images
	Webhooks    jetstream.KeyValue    // webhook settings of API keys with their secrets, and endpoints that fail
	bodies      jetstream.ObjectStore // claim checks
	inline      int                   // bytes of a body that travel in the message
	record      int                   // the same of an execution's record
	news        *news
}

// ackTimeout is how long a message of output waits to be stored before it is held to be lost on the way.
const ackTimeout = 2 * time.Second

// maxInline is the largest body stored in the message itself; larger ones are claim-checked.
const maxInline = 512 << 10

// The record of an execution may fill a message of the usual size but for its header: with 1 MB of output it is one write then, which brings it
// to whoever waits for it as well.
const (
	usualPayload = 1 << 20
	maxRecord    = usualPayload - 16<<10
)

func open(ctx context.Context, nc *nats.Conn, cfg Config) (*Store, error) {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncTimeout(ackTimeout))
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	s := &Store{Conn: nc, JS: js, inline: min(maxInline, int(nc.MaxPayload()/2)), news: &news{of: map[string]*page{}}}
	s.record = s.inline
	if nc.MaxPayload() >= usualPayload {
		s.record = maxRecord
	}
	if err := s.watchLeaders(); err != nil {
		return nil, fmt.Errorf("listen to news: %w", err)
	}
	if cfg.AttachOnly {
		return s, s.openExisting(ctx)
	}
	if !cfg.Restoring {
		if unfinished, err := s.RestoreUnfinished(ctx); err != nil {
			return nil, err
		} else if unfinished {
			return nil, errors.New("a backup was being restored here, and not to its end: run bullpen restore again")
		}
	}
	return s, s.ensure(ctx, cfg)
}

// enter opens what a worker needs, once it is there.
func (s *Store) openExisting(ctx context.Context) error {
	for name, to := range map[string]*jetstream.Stream{jobsName: &s.Jobs, execsName: &s.Executions, outName: &s.Output, headsName: &s.Threads} {
		if err := Retry(ctx, always, func(ctx context.Context) (err error) {
			*to, err = s.JS.Stream(ctx, name)
			return err
		}); err != nil {
			return fmt.Errorf("open stream %s: %w: is a gateway running on this NATS, and is this user allowed its JetStream API?", name, err)
		}
	}
	if err := Retry(ctx, always, func(ctx context.Context) (err error) {
		s.Images, err = s.openBucket(ctx, imagesName)
		return err
	}); err != nil {
		return fmt.Errorf("open bucket %s: %w", imagesName, err)
	}
	if err := Retry(ctx, always, func(ctx context.Context) (err error) {
		s.bodies, err = s.JS.ObjectStore(ctx, bodiesName)
		return err
	}); err != nil {
		return fmt.Errorf("open object store %s: %w", bodiesName, err)
	}
	return nil
}

func (s *Store) openBucket(ctx context.Context, name string) (jetstream.KeyValue, error) {
	b, err := s.JS.KeyValue(ctx, name)
	return bucket{b, s.news}, err
}

// Patiently tries until ctx ends, as long as what failed is passing, for one [IsTransient]. A request that was on its way to a server that died gets
// no answer, so each has a time of its own.
func Retry(ctx context.Context, passing func(error) bool, try func(context.Context) error) error {
	return backoff.Retry(func() error {
		ctx, cancel := context.WithTimeout(ctx, enterTimeout)
		defer cancel()
		err := try(ctx)
		if err != nil && !passing(err) {
			err = backoff.Permanent(err)
		}
		return err
	}, backoff.WithContext(backoff.NewConstantBackOff(enterPause), ctx))
}

func always(error) bool { return true }

// forming reports whether a stream that could not be made may be in a moment: the servers of a cluster have not all met yet.
func forming(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return IsTransient(err) || ok && api.ErrorCode == noPeers
}

// noPeers is the server's code for having found too few others to keep a stream on.
const noPeers jetstream.ErrorCode = 10005

// make opens everything, making what is missing.
func (s *Store) ensure(ctx context.Context, cfg Config) error {
	streams := []struct {
		to  *jetstream.Stream
		cfg jetstream.StreamConfig
	}{
		{&s.Jobs, jetstream.StreamConfig{Name: jobsName, Subjects: []string{root + "job.>"}, MaxMsgsPerSubject: 1}},
		{&s.Executions, jetstream.StreamConfig{
			Name: execsName, Subjects: []string{root + "exec.>"}, MaxMsgsPerSubject: 1, MaxAge: cfg.Retention,
			// Who waits for a result hears of it from the server itself, once the record is stored.
			RePublish: &jetstream.RePublish{Source: root + "exec.*", Destination: root + "done.{{wildcard(1)}}"},
		}},
		{&s.Output, jetstream.StreamConfig{Name: outName, Subjects: []string{root + "out.>"}, MaxAge: cfg.Retention}},
		{&s.DeadLetters, jetstream.StreamConfig{Name: deadName, Subjects: []string{dead + ">"}, MaxMsgsPerSubject: 1, MaxAge: cfg.Retention}},
		{&s.Deliveries, jetstream.StreamConfig{Name: hooksName, Subjects: []string{root + "delivery.>"}, MaxMsgsPerSubject: 1, MaxAge: cfg.Retention}},
		{&s.Threads, jetstream.StreamConfig{Name: headsName, Subjects: []string{ThreadPattern}, MaxMsgsPerSubject: 1}},
	}
	// Output may be relaxed, since the result holds it whole; the server offers that to unreplicated streams only.
	if cfg.Replicas == 1 {
		streams[2].cfg.PersistMode = jetstream.AsyncPersistMode
	}
	for _, st := range streams {
		st.cfg.Replicas, st.cfg.Storage = cfg.Replicas, jetstream.FileStorage
		st.cfg.AllowDirect = cfg.anyServer() && st.to != &s.Threads
		if err := Retry(ctx, forming, func(ctx context.Context) (err error) {
			*st.to, err = s.JS.CreateOrUpdateStream(ctx, st.cfg)
			return err
		}); err != nil {
			return fmt.Errorf("open stream %s: %w: check the NATS server's JetStream and permissions", st.cfg.Name, err)
		}
	}
	buckets := []struct {
		to  *jetstream.KeyValue
		cfg bucketConfig
	}{
		{&s.Keys, bucketOf(keysName)},
		{&s.Profiles, bucketOf(profilesName)},
		{&s.Bindings, bucketOf(bindingsName).kept(min(BindingTTL, cfg.Retention))},
		{&s.Control, bucketOf(controlName)},
		{&s.Images, bucketOf(imagesName)},
		{&s.Webhooks, bucketOf(webhooksName).marked(WebhookMarkerTTL)},
	}
	for _, b := range buckets {
		b.cfg.Replicas, b.cfg.AllowDirect = cfg.Replicas, cfg.anyServer()
		name := strings.TrimPrefix(b.cfg.Name, bucketStreams)
		if err := Retry(ctx, forming, func(ctx context.Context) (err error) {
			if _, err = s.JS.CreateOrUpdateStream(ctx, jetstream.StreamConfig(b.cfg)); err == nil {
				*b.to, err = s.openBucket(ctx, name)
			}
			return err
		}); err != nil {
			return fmt.Errorf("open bucket %s: %w", name, err)
		}
	}
	bodies := objects(bodiesName)
	bodies.MaxAge, bodies.Replicas, bodies.AllowDirect = max(cfg.Retention, bodiesLeast)+bodiesGrace, cfg.Replicas, cfg.anyServer()
	if err := Retry(ctx, forming, func(ctx context.Context) (err error) {
		if _, err = s.JS.CreateOrUpdateStream(ctx, bodies); err == nil {
			s.bodies, err = s.JS.ObjectStore(ctx, bodiesName)
		}
		return err
	}); err != nil {
		return fmt.Errorf("open object store %s: %w", bodiesName, err)
	}
	return nil
}

// anyServer reports whether reads of a stream may be answered by every server that has it. Of several, one that lags behind the leader would
// tell what was true a moment ago, and one that has stopped would leave its share of the questions without an answer.
func (c Config) anyServer() bool { return c.Replicas == 1 }

// Refused reports whether err is the server's answer that it cannot do what was asked, as opposed to no answer.
func IsRejected(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && !IsConflict(err)
}

// Missing reports whether err says that nothing is stored under a name.
func IsNotFound(err error) bool {
	return errors.Is(err, jetstream.ErrMsgNotFound) || errors.Is(err, jetstream.ErrKeyNotFound) ||
		errors.Is(err, jetstream.ErrObjectNotFound)
}

// undecided reports whether err says that another write on the subject is being carried out, which a cluster takes some time for. It may be
// this very one, whose answer was lost; or that of somebody else, which may yet fail.
func undecided(err error) bool {
	api, ok := errors.AsType[*jetstream.APIError](err)
	return ok && api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant
}

// Conflict reports whether err says that a compare-and-set met another value than expected.
func IsConflict(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence ||
		api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}
