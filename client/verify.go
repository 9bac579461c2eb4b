package client

import (
	"crypto/hmac"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
)

// ErrWebhookSignature is wrapped by the errors of [VerifyWebhook].
var ErrWebhookSignature = errors.New("the webhook cannot be trusted")

// VerifyWebhook returns nil if a webhook's signature is valid and the webhook was sent at most tolerance ago, such as
// five minutes. body is the body as received. A webhook may arrive twice: its header webhook-id is the same then.
func VerifyWebhook(body []byte, header http.Header, secret string, tolerance time.Duration) error {
	id, sent := header.Get("Webhook-Id"), header.Get("Webhook-Timestamp")
	seconds, err := strconv.ParseInt(sent, 10, 64)
	if err != nil {
		return fmt.Errorf("%w: it has no header webhook-timestamp with a number of seconds", ErrWebhookSignature)
	}
	if age := time.Since(time.Unix(seconds, 0)).Abs(); age > tolerance {
		return fmt.Errorf("%w: it was sent at another time than now, by %s", ErrWebhookSignature, age.Round(time.Second))
	}
	key, ok := proto.WebhookKey(secret)
	if !ok {
		return fmt.Errorf("%w: the secret is malformed: after whsec_ it must be base64", ErrWebhookSignature)
	}
	want := proto.WebhookSignature(key, id, sent, body)
	for got := range strings.FieldsSeq(header.Get("Webhook-Signature")) {
		if hmac.Equal([]byte(got), []byte(want)) {
			return nil
		}
	}
	return fmt.Errorf("%w: no signature is of this secret", ErrWebhookSignature)
}
