package proto_test

import (
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

// What is masked in the output is no shorter than a secret.
func TestCredentialsOfBucketsHaveALength(t *testing.T) {
	for value, good := range map[string]bool{
		`{"access_key_id":"i","secret_access_key":"1234"}`:                        true,
		`{"access_key_id":"i","secret_access_key":"123"}`:                         false,
		`{"access_key_id":"i","secret_access_key":"a"}`:                           false,
		`{"access_key_id":"i","secret_access_key":"1234","session_token":""}`:     true,
		`{"access_key_id":"i","secret_access_key":"1234","session_token":"1234"}`: true,
		`{"access_key_id":"i","secret_access_key":"1234","session_token":"123"}`:  false,
		`{"access_key_id":"i"}`: false,
	} {
		if _, err := proto.ParseS3Credentials([]byte(value)); (err == nil) != good {
			t.Errorf("%s: %v", value, err)
		}
	}
}
