package worker

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/guest/mask"
	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/worker/inject"
	"github.com/bullpen-run/bullpen/worker/jail"
)

// withSecrets returns the environment of a job with the secrets that are variables.
func withSecrets(job *proto.Job, secrets map[string][]byte) map[string]string {
	if len(secrets) == 0 {
		return job.Env
	}
	env := map[string]string{}
	maps.Copy(env, job.Env)
	for _, b := range job.Bound {
		if b.Env != "" && b.Injection == nil {
			env[b.Env] = string(secrets[b.Secret])
		}
	}
	return env
}

// secretFiles returns the files of the secrets of a job. Each jail has a tmpfs of its own for them.
func secretFiles(job *proto.Job, secrets map[string][]byte) (files []jail.File) {
	for _, b := range job.Bound {
		if b.Env == "" && b.Injection == nil {
			files = append(files, jail.File{
				Path: jail.SecretsDir + "/" + b.Secret, Mode: 0o444, Owner: jail.OwnerInit,
				Content: secrets[b.Secret],
			})
		}
	}
	return files
}

// liveLifetime is how long the certificates of a live sandbox are valid. It is long because clients
// can extend a sandbox's timeout.
const liveLifetime = 365 * 24 * time.Hour

// newInjector returns the proxy that adds secrets to the program's requests, or nil.
func (w *Worker) newInjector(job *proto.Job, secrets map[string][]byte) (*inject.Proxy, error) {
	var injected []inject.Secret
	for _, b := range job.Bound {
		if b.Injection != nil {
			injected = append(injected, inject.Secret{Injection: *b.Injection, Value: string(secrets[b.Secret])})
		}
	}
	if injected == nil {
		return nil, nil
	}
	lifetime := time.Duration(job.Timeout) * time.Second
	if job.Live != nil {
		lifetime = liveLifetime
	}
	return inject.New(injected, lifetime, w.Roots.Pool)
}

// trustVariables name the file of certificate authorities for OpenSSL, Go, Python's requests, curl,
// git, node and deno.
var trustVariables = []string{ // read only
	"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "DENO_CERT",
}

// withTrust makes programs trust the proxy's certificates by adding variables to an environment,
// unless it sets them itself.
func withTrust(env map[string]string) map[string]string {
	with := map[string]string{}
	for _, name := range trustVariables {
		with[name] = jail.TrustFile
	}
	maps.Copy(with, env)
	return with
}

// trustFile returns the file with the system's certificate authorities and the proxy's.
func trustFile(roots inject.Roots, proxy *inject.Proxy) jail.File {
	return jail.File{
		Path: jail.TrustFile, Mode: 0o444, Owner: jail.OwnerInit,
		Content: slices.Concat(roots.PEM, []byte("\n"), proxy.Certificate()),
	}
}

// newMasks returns the masks of a job: of values of Env, and of bound secrets. Secrets that
// programs never get are included, because a server may echo them.
func newMasks(job *proto.Job, bound map[string][]byte) *mask.Masks {
	values := visibleSecrets(job, bound)
	for _, b := range job.Bound {
		if b.Injection != nil {
			values = append(values, string(bound[b.Secret]))
		}
	}
	for _, mounted := range job.Mounts {
		if mounted.S3 == nil {
			continue
		}
		if keys, err := proto.ParseS3Credentials(bound[mounted.S3.Credential]); err == nil {
			values = append(values, keys.SecretAccessKey)
			if keys.SessionToken != "" {
				values = append(values, keys.SessionToken)
			}
		}
	}
	if job.Live != nil {
		values = append(values, escapedLines(values)...)
	}
	return mask.New(values)
}

// escapedLines returns values and their lines as they are in the log of a live sandbox, which is
// JSON, where that differs.
func escapedLines(values []string) (escaped []string) {
	for _, value := range values {
		lines := []string{value}
		for line := range strings.Lines(value) {
			if line = strings.TrimRight(line, "\r\n"); len(line) >= mask.MinLine {
				lines = append(lines, line)
			}
		}
		for _, line := range lines {
			var b bytes.Buffer
			encoder := json.NewEncoder(&b) // as package guest/process has it
			encoder.SetEscapeHTML(false)
			if err := encoder.Encode(line); err != nil {
				continue
			}
			if text := b.String()[1 : b.Len()-len("\"\n")]; text != line {
				escaped = append(escaped, text)
			}
		}
	}
	return escaped
}

// visibleSecrets returns the secrets to mask that the program itself has, in its environment or in files.
func visibleSecrets(job *proto.Job, bound map[string][]byte) []string {
	var values []string
	for _, name := range job.Secrets {
		values = append(values, job.Env[name])
	}
	for _, b := range job.Bound {
		if b.Mask && b.Injection == nil {
			values = append(values, string(bound[b.Secret]))
		}
	}
	return values
}
