package queue

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"filippo.io/age"
	"github.com/nats-io/nats.go"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/scheduler/keyring"
	"github.com/bullpen-run/bullpen/scheduler/store"
)

const (
	// secretsTimeout limits how long a worker waits for secrets, such as during a leader change.
	secretsTimeout = 10 * time.Second
	secretsPause   = 100 * time.Millisecond
	maxSecretsSize = 1 << 20 // bytes of all values of an execution, as JSON
)

// errNotAssigned means that the dispatcher does not know, perhaps not yet, that the worker has the
// execution.
var errNotAssigned = errors.New("the execution is not assigned to this worker")

// secretsRequest asks for the secrets of an execution.
type secretsRequest struct {
	Trace     proto.TraceID `json:"trace"`
	Worker    string        `json:"worker"`
	Recipient string        `json:"recipient"` // of age, for the answer
	Sealed    []byte        `json:"sealed"`    // as in the job
}

// secretsReply has the values as JSON, encrypted for the recipient.
type secretsReply struct {
	Encrypted []byte `json:"encrypted,omitempty"`
	// NotAssigned means that the dispatcher knows of no such assignment. Refused is why the secrets
	// cannot be decrypted.
	NotAssigned bool   `json:"not_assigned,omitempty"`
	Refused     string `json:"refused,omitempty"`
}

// onSecretsRequest answers if the execution is assigned to the requesting worker. Secrets are
// encrypted for one execution, so a worker cannot get those of another.
func (t *term) onSecretsRequest(ctx context.Context, m *nats.Msg) {
	var r secretsRequest
	if err := json.Unmarshal(m.Data, &r); err != nil {
		t.Log.Error("malformed request for secrets ignored", "error", err)
		return
	}
	if !t.stillLeader() {
		return
	}
	if j := t.queue.jobs[r.Trace]; j == nil || j.worker != r.Worker || j.state != assigned && j.state != running {
		go t.reply(m, secretsReply{NotAssigned: true})
		return
	}
	go func() {
		encrypted, err := t.encryptSecrets(ctx, &r)
		reply := secretsReply{Encrypted: encrypted}
		if err != nil {
			t.Log.Error("secrets of an execution not decrypted", "trace_id", r.Trace, "worker", r.Worker, "error", err)
			reply.Refused = "the dispatcher cannot decrypt the secrets; the cause is in its log"
		}
		t.reply(m, reply)
	}()
}

func (t *term) encryptSecrets(ctx context.Context, r *secretsRequest) ([]byte, error) {
	values, err := t.Secrets.Open(ctx, keyring.JobName(string(r.Trace)), r.Sealed)
	if err != nil {
		return nil, err
	}
	recipient, err := age.ParseX25519Recipient(r.Recipient)
	if err != nil {
		return nil, err
	}
	var encrypted bytes.Buffer
	w, err := age.Encrypt(&encrypted, recipient)
	if err == nil {
		_, err = w.Write(values)
	}
	if err == nil {
		err = w.Close()
	}
	return encrypted.Bytes(), err
}

// Secrets returns the values of the job's secrets by name. Only this process can decrypt the
// dispatcher's answer.
func (l *Lease) Secrets(ctx context.Context) (map[string][]byte, error) {
	if len(l.job.Sealed) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, secretsTimeout)
	defer cancel()
	identity, err := age.GenerateX25519Identity()
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(secretsRequest{l.id, l.slots.Worker, identity.Recipient().String(), l.job.Sealed})
	if err != nil {
		return nil, err
	}
	q := &Queue{Store: l.slots.Store}
	for {
		var reply secretsReply
		if err := q.request(ctx, &nats.Msg{Subject: store.JobSecretsSubject, Data: body}, &reply); err != nil {
			return nil, fmt.Errorf("ask for the secrets of %s: %w", l.id, err)
		}
		switch {
		case reply.Refused != "":
			return nil, fmt.Errorf("ask for the secrets of %s: %s", l.id, reply.Refused)
		case !reply.NotAssigned:
			return decryptSecrets(reply.Encrypted, identity)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("ask for the secrets of %s: %w", l.id, errNotAssigned)
		case <-time.After(secretsPause):
		}
	}
}

func decryptSecrets(encrypted []byte, identity age.Identity) (values map[string][]byte, err error) {
	r, err := age.Decrypt(bytes.NewReader(encrypted), identity)
	if err == nil {
		err = json.NewDecoder(io.LimitReader(r, maxSecretsSize)).Decode(&values)
	}
	if err != nil {
		return nil, fmt.Errorf("decrypt the secrets: %w", err)
	}
	return values, nil
}
