package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

const (
	adminPath        = "/v1/admin"
	sessionsPath     = adminPath + "/sessions"
	profilesPath     = adminPath + "/profiles"
	secretsPath      = adminPath + "/secrets"
	imagesPath       = adminPath + "/images"
	workersPath      = adminPath + "/workers"
	deadLettersPath  = adminPath + "/dead-letters"
	adminThreadsPath = adminPath + "/threads"
)

// Admin has the methods that need an administrator's API key: an organisation's for its objects, a
// global one for the server's.
type Admin struct {
	client *Client

	Orgs    Resource[api.Org, api.OrgRequest, api.OrgRequest]
	Plans   Resource[proto.Plan, proto.Plan, proto.Plan]
	Keys    Resource[api.Key, api.KeyRequest, api.KeySettings]
	Members Resource[api.Member, api.MemberRequest, api.MemberSettings]
}

// Admin returns what needs the API key of an administrator.
func (c *Client) Admin() *Admin {
	a := &Admin{client: c}
	a.Orgs, a.Plans = ResourceOf(a, api.OrgResource), ResourceOf(a, api.PlanResource)
	a.Keys, a.Members = ResourceOf(a, api.KeyResource), ResourceOf(a, api.MemberResource)
	return a
}

// DeleteOrg deletes an organisation with all its data, if it still has the ETag of an earlier
// answer, see [Admin.OrgTag]. The deletion takes some time: see [Admin.OrgData].
func (a *Admin) DeleteOrg(ctx context.Context, name, tag string) (*api.Org, error) {
	header := map[string]string{"If-Match": tag}
	return get[api.Org](ctx, a.client, call{method: http.MethodDelete, path: a.Orgs.at(name), header: header})
}

// OrgTag returns an organisation with its ETag, which changes with it.
func (a *Admin) OrgTag(ctx context.Context, name string) (org *api.Org, tag string, err error) {
	org = new(api.Org)
	header, err := a.client.decode(ctx, call{method: http.MethodGet, path: a.Orgs.at(name), resend: true}, org)
	if err != nil {
		return nil, "", err
	}
	return org, header.Get("ETag"), nil
}

// OrgData returns the stored data of an organisation, which need not exist.
func (a *Admin) OrgData(ctx context.Context, name string) (*api.OrgData, error) {
	return read[api.OrgData](ctx, a.client, a.Orgs.at(name)+"/data")
}

// RotateKey replaces the secret of an API key, and returns the key with the new one. The previous
// secret works for the overlap. The request is not resent when the connection breaks. After
// [ErrUnknownOutcome] the key's new secret may be lost: rotate it again within the overlap.
func (a *Admin) RotateKey(ctx context.Context, id string, overlap time.Duration) (*api.Key, error) {
	body := api.KeyRotation{Overlap: new(proto.Seconds(overlap))}
	return get[api.Key](ctx, a.client, call{method: http.MethodPost, path: a.Keys.at(id) + "/rotate", body: body})
}

// RevokeKey revokes an API key.
func (a *Admin) RevokeKey(ctx context.Context, id string) (*api.Key, error) {
	return get[api.Key](ctx, a.client, call{method: http.MethodDelete, path: a.Keys.at(id), resend: true})
}

// Sessions returns the browser sessions in an organisation or, if org is empty, in all that the key
// in use may see.
func (a *Admin) Sessions(ctx context.Context, org string) iter.Seq2[api.Session, error] {
	return pages[api.Session](ctx, a.client, sessionsPath, "sessions", largestPagesOf(org))
}

// EndSession ends the session of a browser.
func (a *Admin) EndSession(ctx context.Context, id string) error {
	return a.client.empty(ctx, call{method: http.MethodDelete, path: sessionsPath + "/" + url.PathEscape(id)})
}

// Profiles returns the sandbox profiles.
func (a *Admin) Profiles(ctx context.Context) iter.Seq2[proto.Profile, error] {
	return pages[proto.Profile](ctx, a.client, profilesPath, "profiles", largestPages())
}

func profilePath(name string) string { return profilesPath + "/" + url.PathEscape(name) }

// Profile returns a sandbox profile.
func (a *Admin) Profile(ctx context.Context, name string) (*proto.Profile, error) {
	return read[proto.Profile](ctx, a.client, profilePath(name))
}

// CreateProfile stores a new sandbox profile and returns it complete. profile is a [proto.Profile],
// or any value whose JSON has some of its members: the server fills in the others.
func (a *Admin) CreateProfile(ctx context.Context, profile any) (*proto.Profile, error) {
	return get[proto.Profile](ctx, a.client, call{method: http.MethodPost, path: profilesPath, body: profile})
}

// ReplaceProfile replaces a sandbox profile, given as in [Admin.CreateProfile], and returns it
// complete.
func (a *Admin) ReplaceProfile(ctx context.Context, name string, profile any) (*proto.Profile, error) {
	return get[proto.Profile](ctx, a.client, call{
		method: http.MethodPut, path: profilePath(name), body: profile, resend: true,
	})
}

// RemoveProfile removes a sandbox profile and returns it.
func (a *Admin) RemoveProfile(ctx context.Context, name string) (*proto.Profile, error) {
	return get[proto.Profile](ctx, a.client, call{method: http.MethodDelete, path: profilePath(name)})
}

// ProfilePreload returns the last failure to preload the modules of a profile.
func (a *Admin) ProfilePreload(ctx context.Context, name string) (*api.ProfilePreload, error) {
	return read[api.ProfilePreload](ctx, a.client, profilePath(name)+"/preload")
}

// secretPath returns the path of a secret. An empty org is the API key's.
func secretPath(org, name string) string {
	return withQuery(secretsPath+"/"+url.PathEscape(name), url.Values{"org": {org}})
}

// PutSecret stores a secret of an organisation, by default of the API key's. If injection is nil, a
// replaced secret keeps its own.
func (a *Admin) PutSecret(ctx context.Context, org, name, value string, injection *proto.Injection,
) (*api.Secret, error) {
	body := api.SecretRequest{Value: value, Injection: injection}
	return get[api.Secret](ctx, a.client, call{
		method: http.MethodPut, path: secretPath(org, name), body: body, resend: true,
	})
}

// Secret returns a secret without its value.
func (a *Admin) Secret(ctx context.Context, org, name string) (*api.Secret, error) {
	return read[api.Secret](ctx, a.client, secretPath(org, name))
}

// Secrets returns the secrets of an organisation, without their values.
func (a *Admin) Secrets(ctx context.Context, org string) iter.Seq2[api.Secret, error] {
	return pages[api.Secret](ctx, a.client, secretsPath, "secrets", largestPagesOf(org))
}

// DeleteSecret removes a secret.
func (a *Admin) DeleteSecret(ctx context.Context, org, name string) error {
	return a.client.empty(ctx, call{method: http.MethodDelete, path: secretPath(org, name)})
}

// RotateSecretsKey protects the secrets of the server with the operator's present keys.
func (a *Admin) RotateSecretsKey(ctx context.Context) (*api.RotatedKey, error) {
	return get[api.RotatedKey](ctx, a.client, call{method: http.MethodPost, path: secretsPath + "/rotate-key"})
}

// Connections has the storage connections of an organisation. The default is the API key's, but a
// global administrator's List then returns those of all organisations. If test is true, the server
// tests the storage before it stores a connection.
func (a *Admin) Connections(org string, test bool,
) Resource[api.Connection, api.ConnectionRequest, api.ConnectionRequest] {
	r := ResourceOf(a, api.ConnectionResource)
	r.query = url.Values{"org": {org}}
	if !test {
		r.query.Set("test", "false")
	}
	return r
}

// connectionPath returns the path of a part of a storage connection.
func connectionPath(org, slug, part string, query url.Values) string {
	query.Set("org", org)
	return withQuery(adminPath+"/connections/"+url.PathEscape(slug)+"/"+part, query)
}

// TestConnection makes the server use the storage of a connection.
func (a *Admin) TestConnection(ctx context.Context, org, slug string) (*api.Connection, error) {
	path := connectionPath(org, slug, "test", url.Values{})
	return get[api.Connection](ctx, a.client, call{method: http.MethodPost, path: path})
}

// Volume returns the stored state of a storage connection of kind volume. An empty org is the API
// key's.
func (a *Admin) Volume(ctx context.Context, org, slug string) (*api.Volume, error) {
	return read[api.Volume](ctx, a.client, connectionPath(org, slug, "volume", url.Values{}))
}

// ForkVolume creates a volume with the files of another one, and returns its connection.
func (a *Admin) ForkVolume(ctx context.Context, org, slug string, fork *api.ForkVolumeRequest,
) (*api.Connection, error) {
	path := connectionPath(org, slug, "fork", url.Values{})
	return get[api.Connection](ctx, a.client, call{method: http.MethodPost, path: path, body: fork})
}

// VolumeArchive writes a directory of a version of a volume to w as a tar: everything if dir is empty,
// and the newest version for 0.
func (a *Admin) VolumeArchive(ctx context.Context, org, slug string, version int64, dir string, w io.Writer) error {
	return a.client.archive(ctx, connectionPath(org, slug, "archive", archiveQuery(version, dir)), w)
}

// RemovePipelineCache removes a cache of an organisation, by default of the key's.
func (a *Admin) RemovePipelineCache(ctx context.Context, org, key string) error {
	path := withQuery(adminPath+"/caches/"+url.PathEscape(key), url.Values{"org": {org}})
	return a.client.empty(ctx, call{method: http.MethodDelete, path: path})
}

// PutImage stores a sandbox image of size bytes under a name, replacing a previous one. digest is
// the image's, such as sha256:…. The body is sent once.
func (a *Admin) PutImage(ctx context.Context, name, digest string, body io.Reader, size int64) (*api.Image, error) {
	path := imagesPath + "/" + url.PathEscape(name) + "?digest=" + url.QueryEscape(digest)
	return get[api.Image](ctx, a.client, sendOnce(path, "application/zstd", body, size))
}

// Images returns the sandbox images.
func (a *Admin) Images(ctx context.Context) iter.Seq2[api.Image, error] {
	return pages[api.Image](ctx, a.client, imagesPath, "images", largestPages())
}

// RemoveImage removes the name of an image and returns it.
func (a *Admin) RemoveImage(ctx context.Context, name string) (*api.Image, error) {
	return get[api.Image](ctx, a.client, call{method: http.MethodDelete, path: imagesPath + "/" + url.PathEscape(name)})
}

// Workers returns the live workers.
func (a *Admin) Workers(ctx context.Context) ([]api.Worker, error) {
	return Collect(pages[api.Worker](ctx, a.client, workersPath, "workers", nil))
}

// Queues returns the queues of all organisations that have something queued or running.
func (a *Admin) Queues(ctx context.Context) ([]api.OrgQueue, error) {
	return Collect(pages[api.OrgQueue](ctx, a.client, adminPath+"/queue", "orgs", nil))
}

// Pools returns the pools of workers with the demand for them.
func (a *Admin) Pools(ctx context.Context) ([]api.Pool, error) {
	return Collect(pages[api.Pool](ctx, a.client, adminPath+"/autoscale", "pools", nil))
}

// Processes returns the processes of the deployment that answer the gateway within 3 seconds.
func (a *Admin) Processes(ctx context.Context) ([]api.Process, error) {
	return Collect(pages[api.Process](ctx, a.client, adminPath+"/processes", "processes", nil))
}

// DrainWorker makes a worker stop taking executions, or resume if drain is false.
func (a *Admin) DrainWorker(ctx context.Context, name string, drain bool) (*api.Worker, error) {
	verb := "/undrain"
	if drain {
		verb = "/drain"
	}
	return get[api.Worker](ctx, a.client, call{
		method: http.MethodPost, path: workersPath + "/" + url.PathEscape(name) + verb, resend: true,
	})
}

func deadLetterPath(id string) string { return deadLettersPath + "/" + url.PathEscape(id) }

// DeadLetters returns the dead letters, the newest first.
func (a *Admin) DeadLetters(ctx context.Context) iter.Seq2[api.DeadLetter, error] {
	return pages[api.DeadLetter](ctx, a.client, deadLettersPath, "dead_letters", largestPages())
}

// DeadLetter returns a dead letter with its content.
func (a *Admin) DeadLetter(ctx context.Context, id string) (*api.WholeDeadLetter, error) {
	return read[api.WholeDeadLetter](ctx, a.client, deadLetterPath(id))
}

// Requeue runs the job of a dead letter again, and returns the dead letter, which names the
// execution. The request may be resent: a dead letter has at most one new execution.
func (a *Admin) Requeue(ctx context.Context, id string) (*api.DeadLetter, error) {
	return get[api.DeadLetter](ctx, a.client, call{
		method: http.MethodPost, path: deadLetterPath(id) + "/requeue", resend: true,
	})
}

// RemoveDeadLetter removes a dead letter with its job.
func (a *Admin) RemoveDeadLetter(ctx context.Context, id string) error {
	return a.client.empty(ctx, call{method: http.MethodDelete, path: deadLetterPath(id)})
}

// CollectThreads removes garbage older than safeAge from the store of threads. If safeAge is nil,
// the server's default applies.
func (a *Admin) CollectThreads(ctx context.Context, safeAge *time.Duration) (*proto.Collected, error) {
	var body api.CollectRequest
	if safeAge != nil {
		body.SafeAge = proto.Seconds(*safeAge)
	}
	return get[proto.Collected](ctx, a.client, call{method: http.MethodPost, path: adminThreadsPath + "/gc", body: body})
}

// RebuildThreads rebuilds threads from the store.
func (a *Admin) RebuildThreads(ctx context.Context) (*proto.Rebuilt, error) {
	return get[proto.Rebuilt](ctx, a.client, call{method: http.MethodPost, path: adminThreadsPath + "/rebuild"})
}

// Backup returns a backup of the server's JetStream, compressed with Zstandard, while the server creates
// it.
func (a *Admin) Backup(ctx context.Context) (io.ReadCloser, error) {
	resp, err := a.client.do(ctx, call{
		method: http.MethodGet, path: adminPath + "/backup", header: map[string]string{"Accept": "application/zstd"},
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
