package admission

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// stepWait is how long the start of a step waits for another process starting the same step.
const stepWait = 5 * time.Second

// CheckPipeline refuses a run if one of its steps would be refused now, or if its secrets do not
// match the names in its steps.
func (a *Admission) CheckPipeline(ctx context.Context, p *proto.Pipeline) error {
	if err := a.checkStepSecrets(ctx, p); err != nil {
		return err
	}
	for i := range p.Steps {
		step := &p.Steps[i]
		for j := range step.Cells {
			_, err := a.stepJob(ctx, p, i, j, proto.NewTraceID())
			if field, ok := errors.AsType[*proto.FieldError](err); ok {
				return proto.FieldErrorf("file", "line %d: step %s: %s", step.Line, step.Name, field.Message)
			}
			if rejection, ok := errors.AsType[*proto.Rejection](err); ok {
				return placedRejection(step, &step.Cells[j], rejection)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// placedRejection words a cell's rejection for the client that started the run.
func placedRejection(step *proto.PipelineStep, cell *proto.MatrixCell, rejection *proto.Rejection) error {
	e, line := *api.NewError(rejection), step.Line
	if cell.Profile != "" && e.Reason == api.ReasonMissing {
		return proto.FieldErrorf("file", "line %d: step %s: %s", step.ProfileLine, step.Name, e.Message)
	}
	if cell.Profile != "" && e.Code == api.CodeForbidden {
		line = step.ProfileLine
	}
	e.Message = fmt.Sprintf("line %d of the file: step %s: %s", line, step.Name, e.Message)
	return &e
}

// checkStepSecrets returns a [*proto.FieldError] with every secret that a step names and cannot
// have, or with one of the run's that no step names.
func (a *Admission) checkStepSecrets(ctx context.Context, p *proto.Pipeline) error {
	named, missing := map[string]bool{}, []string{}
	for i := range p.Steps {
		step := &p.Steps[i]
		if len(step.Secrets) == 0 {
			continue
		}
		for j := range step.Cells {
			var without []string
			key, _, err := a.stepKey(ctx, p, i, j)
			if err == nil {
				_, without, err = a.storedSecrets(ctx, p, step, key)
			}
			if _, ok := errors.AsType[*proto.Rejection](err); ok {
				continue // stepJob returns it too, and its caller adds the step's name
			}
			if err != nil {
				return err
			}
			for _, name := range without {
				if !named[name] {
					missing = append(missing, name+", which step "+step.Name+" names")
				}
				named[name] = true
			}
		}
		for _, name := range step.Secrets {
			named[name] = true
		}
	}
	if len(missing) > 0 {
		return proto.FieldErrorf("secrets", "must have a value of %s; "+
			"or an administrator stores a secret of this name, and binds it to the API key", strings.Join(missing,
			", and of "))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Secrets)) {
		if !named[name] {
			return proto.FieldErrorf("secrets", "has %s, which no step names", name)
		}
	}
	return nil
}

// storedSecrets returns the bindings of the secrets that a step names and the run does not supply.
// They bind the secret as a masked variable of that name, unless programs never get it. Only
// secrets bound to the key or its profile are used: otherwise anyone who may start a run could read
// every secret of the organisation. missing are the names that are not bound, or not stored.
func (a *Admission) storedSecrets(
	ctx context.Context, p *proto.Pipeline, step *proto.PipelineStep, key *proto.Key,
) (bindings, missing []string, err error) {
	profile, err := a.ProfileOf(ctx, key)
	if err != nil {
		return nil, nil, err
	}
	bound, err := proto.MergeSecrets(profile.Secrets, key.Secrets)
	if err != nil {
		return nil, nil, err
	}
	for _, name := range step.Secrets {
		if _, ok := p.Secrets[name]; ok {
			continue
		}
		i := slices.IndexFunc(bound, func(b proto.SecretBinding) bool { return b.Env == name })
		if i < 0 {
			i = slices.IndexFunc(bound, func(b proto.SecretBinding) bool { return b.Secret == name })
		}
		if i < 0 {
			missing = append(missing, name)
			continue
		}
		secret, err := a.Secrets.Get(ctx, key.Org, bound[i].Secret)
		switch {
		case errors.Is(err, proto.ErrNotFound):
			missing = append(missing, name)
		case err != nil:
			return nil, nil, err
		case secret.Injection != nil:
			bindings = append(bindings, proto.SecretBinding{Secret: bound[i].Secret}.String())
		default:
			bindings = append(bindings, proto.SecretBinding{Secret: bound[i].Secret, Env: name, Mask: true}.String())
		}
	}
	return bindings, missing, nil
}

// StartStep starts the execution of a cell of a run in a thread, unless it was started before, and
// returns its id. refused is the reason if it will never start, otherwise empty. After an error it
// may have started.
func (a *Admission) StartStep(
	ctx context.Context, p *proto.Pipeline, step, cell int, thread string,
) (id proto.TraceID, refused string, err error) {
	id = proto.NewTraceID()
	ctx, span := a.startSpan(ctx, id, "step", p.Org, p.Key)
	defer func() { endSpan(span, err) }()
	job, err := a.stepJob(ctx, p, step, cell, id)
	if err != nil {
		refused, err := settle(err)
		return "", refused, err
	}
	job.ThreadID = thread
	id, err = a.Submit(ctx, &proto.Submission{
		Job: job, IdempotencyKey: fmt.Sprintf("%s %d %d", p.ID, step, cell), BodyHash: p.ID,
		WaitUntil: time.Now().Add(stepWait),
	})
	if err != nil {
		refused, err := settle(err)
		return "", refused, err
	}
	return id, "", nil
}

// StepSpace returns the maximum size of a cell's home. refused is the reason if the cell will never
// start, otherwise empty.
func (a *Admission) StepSpace(
	ctx context.Context, p *proto.Pipeline, step, cell int,
) (most proto.Space, refused string, err error) {
	var profile proto.Profile
	key, _, err := a.stepKey(ctx, p, step, cell)
	if err == nil {
		profile, err = a.ProfileOf(ctx, key)
	}
	if err != nil {
		refused, err = settle(err)
		return most, refused, err
	}
	return proto.Space{Bytes: int64(profile.Disk.Home), Files: profile.Disk.Inodes}, "", nil
}

// stepKey returns the API key of a run, bound to the sandbox profile of a cell.
func (a *Admission) stepKey(
	ctx context.Context, p *proto.Pipeline, step, cell int,
) (*proto.Key, proto.Entitlement, error) {
	key, plan, err := a.ValidKey(ctx, p.Key)
	if err != nil {
		return nil, plan, err
	}
	profile := p.Steps[step].Cells[cell].Profile
	if profile == "" {
		return key, plan, nil
	}
	// A global administrator may create a key for any profile. Others keep to those of their keys.
	if allowed := key.AllowedProfiles(); !slices.Contains(allowed, profile) && !key.GlobalAdmin() {
		return nil, plan, &proto.Rejection{Reason: proto.RejectedProfile, Name: profile, Allowed: allowed}
	}
	bound := *key
	bound.Profile = profile
	return &bound, plan, nil
}

// stepJob returns the job of a cell, without its thread.
func (a *Admission) stepJob(
	ctx context.Context, p *proto.Pipeline, step, cell int, id proto.TraceID,
) (*proto.Job, error) {
	key, plan, err := a.stepKey(ctx, p, step, cell)
	if err != nil {
		return nil, err
	}
	x := &p.Steps[step]
	env, err := stepEnv(p, x, cell)
	if err != nil {
		return nil, err
	}
	code, err := x.CellCode(cell)
	if err != nil {
		return nil, err
	}
	request := &api.ExecuteRequest{
		Code: code, Language: x.Language, Timeout: x.Timeout, KillGrace: x.KillGrace, Env: env, MaxAttempts: 1,
	}
	if err := request.Validate(); err != nil {
		return nil, err
	}
	bindings, missing, err := a.storedSecrets(ctx, p, x, key)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 { // they were there when the run was accepted
		return nil, proto.FieldErrorf("secrets", "must have a value of %s, which is not stored any more, or not bound "+
			"to the API key",
			strings.Join(missing, " and of "))
	}
	with := *key
	with.Secrets = slices.Concat(bindings, key.Secrets)
	job, err := a.Job(ctx, request, proto.Caller{Key: &with, Entitlement: plan}, proto.ModeAsync, id, 0)
	if err != nil {
		return nil, err
	}
	job.PipelineID, job.Step = p.ID, x.Name
	for _, name := range x.Secrets {
		if _, ok := p.Secrets[name]; ok {
			job.Secrets = append(job.Secrets, name)
		}
	}
	if name := x.Cells[cell].Name; name != "" {
		job.Step += " (" + name + ")"
	}
	job.WebhookURL = "" // a run has too many results for the URL of the key
	return job, nil
}

// stepEnv returns the variables of a cell.
func stepEnv(p *proto.Pipeline, step *proto.PipelineStep, cell int) (map[string]string, error) {
	own, err := step.CellEnv(cell)
	if err != nil {
		return nil, err
	}
	standard := map[string]string{"CI": "true", "CI_PIPELINE_ID": p.ID, "CI_STEP_NAME": step.Name}
	if p.Commit != "" {
		standard["CI_COMMIT_SHA"] = p.Commit
	}
	if p.Branch != "" {
		standard["CI_COMMIT_BRANCH"] = p.Branch
	}
	for name, value := range step.Cells[cell].Values {
		standard["MATRIX_"+strings.ToUpper(name)] = value
	}
	secrets := map[string]string{}
	for _, name := range step.Secrets {
		if value, ok := p.Secrets[name]; ok {
			secrets[name] = value
		}
	}
	return proto.MergeEnv(p.Env, own, secrets, standard)
}
