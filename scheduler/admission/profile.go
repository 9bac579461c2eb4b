package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/bullpen-run/bullpen/proto"
)

// Profiles finds the sandbox profiles.
type Profiles interface {
	// Profile returns a profile, or [proto.ErrNotFound].
	Profile(ctx context.Context, name string) (proto.Profile, error)
}

// Images finds sandbox images.
type Images interface {
	// Image returns an image, or [proto.ErrNotFound].
	Image(ctx context.Context, name string) (*proto.Image, error)
}

// Secrets finds the named secrets of organisations.
type Secrets interface {
	// Get returns a secret without its value, or [proto.ErrNotFound].
	Get(ctx context.Context, org, name string) (proto.Secret, error)
	// Value returns the value of a secret, or [proto.ErrNotFound].
	Value(ctx context.Context, org, name string) ([]byte, error)
	// Bind returns the bound secrets, and their values encrypted for one execution. It sets the
	// injections of the bindings. It returns a [*proto.MissingSecretError] if one does not exist.
	Bind(ctx context.Context, org string, id proto.TraceID, bound []proto.SecretBinding) (
		secrets map[string]proto.Secret, sealed []byte, err error)
}

// Webhooks finds the webhook settings of API keys.
type Webhooks interface {
	// Webhook returns the settings of a key, or the default.
	Webhook(org, key string) proto.Webhook
}

// URLs checks webhook URLs. Its errors are [*proto.FieldError] for the given field.
type URLs interface {
	// CheckURL checks the text of a URL without resolving its host.
	CheckURL(field, url string) error
	// Check checks the text of a URL and the addresses of its host.
	Check(ctx context.Context, field, url string) error
}

// ProfileOf returns a key's own sandbox profile, as [Admission.ProfileFor] does.
func (a *Admission) ProfileOf(ctx context.Context, key *proto.Key) (proto.Profile, error) {
	return a.ProfileFor(ctx, key, "")
}

// ProfileFor returns the sandbox profile that a request with a key chooses by name; an empty name
// chooses the key's own. A global administrator, who may create a key for any profile, may choose any
// profile: a [*proto.FieldError] says that it does not exist. ProfileFor returns a [*proto.Rejection] if
// the key does not allow the profile, and if one of the key's own does not exist: another one, such as
// the default, might allow more.
func (a *Admission) ProfileFor(ctx context.Context, key *proto.Key, name string) (proto.Profile, error) {
	allowed := key.AllowedProfiles()
	name = cmp.Or(name, allowed[0])
	own := slices.Contains(allowed, name)
	if !own && !key.GlobalAdmin() {
		return proto.Profile{}, &proto.Rejection{Reason: proto.RejectedProfile, Name: name, Allowed: allowed}
	}
	p, err := a.Profile(ctx, name)
	switch {
	case errors.Is(err, proto.ErrNotFound) && own:
		return p, &proto.Rejection{Reason: proto.RejectedNoProfile, Name: name}
	case errors.Is(err, proto.ErrNotFound):
		return p, proto.FieldErrorf("profile", "%q does not exist: see `bullpen profile list`", name)
	}
	return p, err
}

// chooseImage replaces the image of a profile by one that a request with a key names; an empty name
// keeps the profile's. Only global administrators may choose. For others, an image is bound to the
// network, the secrets and the limits of the profiles that name it: it may contain what must not leave
// the network of its profile.
func (a *Admission) chooseImage(ctx context.Context, key *proto.Key, p *proto.Profile, name string) error {
	if name == "" {
		return nil
	}
	if !key.GlobalAdmin() {
		return &proto.Rejection{Reason: proto.RejectedImage, Name: name, Allowed: key.AllowedProfiles()}
	}
	if _, err := a.Images.Image(ctx, name); errors.Is(err, proto.ErrNotFound) {
		return proto.FieldErrorf("image", "%q does not exist: see `bullpen image list`", name)
	} else if err != nil {
		return fmt.Errorf("look up image %s: %w", name, err)
	}
	p.Image = name
	return nil
}

// DefaultProfile returns the profile of keys without one.
func (a *Admission) DefaultProfile() proto.Profile { return a.Default }

// Profile returns the profile of that name, which may be a built-in one, or [proto.ErrNotFound].
func (a *Admission) Profile(ctx context.Context, name string) (proto.Profile, error) {
	switch name {
	case proto.DefaultProfileName:
		return a.Default, nil
	case proto.AgentsProfileName:
		return proto.AgentsProfile(a.Default), nil
	}
	if proto.CheckProfileName(name) != nil {
		return proto.Profile{}, proto.ErrNotFound
	}
	p, err := a.Profiles.Profile(ctx, name)
	if err != nil {
		return p, fmt.Errorf("look up profile: %w", err)
	}
	return p, nil
}

// Sandbox returns the snapshot of a profile for a program in language. A profile without an image
// uses the default profile's.
func (a *Admission) Sandbox(ctx context.Context, p *proto.Profile, language proto.Language) (proto.Sandbox, error) {
	if p.Image == "" && a.Default.Image != "" {
		imaged := *p
		imaged.Image = a.Default.Image
		p = &imaged
	}
	name, ok := p.ImageName()
	if !ok {
		return p.Sandbox(""), nil
	}
	image, err := a.Images.Image(ctx, name)
	if errors.Is(err, proto.ErrNotFound) {
		return proto.Sandbox{}, &proto.Rejection{Reason: proto.RejectedNoImage, Name: name, Profile: p.Name}
	}
	if err != nil {
		return proto.Sandbox{}, fmt.Errorf("look up image %s: %w", name, err)
	}
	if language != "" { // which a live sandbox does not need
		if _, err := image.Interpreter(language); err != nil {
			return proto.Sandbox{}, err
		}
	}
	sandbox := p.Sandbox(image.Digest)
	sandbox.Architecture = image.Architecture
	return sandbox, nil
}

// WebhookURL returns where to deliver the result of a request, empty for nowhere. url is the
// request's; if empty, the key's own is used. In a mode without webhook only the form of the URL is
// checked.
func (a *Admission) WebhookURL(ctx context.Context, url string, mode proto.Mode, key *proto.Key) (string, error) {
	const field = "webhook_url"
	switch {
	case mode != proto.ModeAsync && url == "":
		return "", nil
	case mode != proto.ModeAsync:
		return "", a.URLs.CheckURL(field, url)
	case url == "":
		return a.Webhooks.Webhook(key.Org, key.ID).URL, nil
	default:
		return url, a.URLs.Check(ctx, field, url)
	}
}

// sealSecrets sets the Sealed of a job: the values of its secrets and the credentials of its mounts,
// encrypted. It sets the injections of the bindings. requested are the variables of the request.
func (a *Admission) sealSecrets(ctx context.Context, job *proto.Job, requested map[string]string) error {
	needed := slices.Clone(job.Bound)
	for _, m := range job.Mounts {
		if m.S3 != nil {
			needed = append(needed, proto.SecretBinding{Secret: m.S3.Credential})
		}
	}
	if len(needed) == 0 {
		return nil
	}
	secrets, sealed, err := a.Secrets.Bind(ctx, job.Org, job.TraceID, needed)
	if missing, ok := errors.AsType[*proto.MissingSecretError](err); ok {
		return &proto.Rejection{Reason: proto.RejectedNoSecret, Name: missing.Secret}
	}
	if err != nil {
		return fmt.Errorf("bind secrets: %w", err)
	}
	copy(job.Bound, needed)
	job.Sealed, job.HasSecrets, job.HasInjections = sealed, true, proto.HasInjections(job.Bound)
	if err := proto.CheckInjections(job.Bound, job.Sandbox.Network.Effective()); err != nil {
		return err
	}
	return proto.CheckSecretEnv(job.Env, requested, job.Bound, secrets)
}
