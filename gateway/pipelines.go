package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// stepWait is how long the start of a step waits for another process that starts the same one.
const stepWait = 5 * time.Second

func pipelineError(id string, err error) error {
	if errors.Is(err, proto.ErrNotFound) {
		return api.Errorf(api.CodeNotFound, "there is no run of that id; see /v1/pipelines")
	}
	return fmt.Errorf("run %s: %w", id, err)
}

// pipelineID returns the id in the path. An id of the wrong form does not exist.
func pipelineID(r *http.Request) (string, error) {
	id := chi.URLParam(r, "id")
	if !proto.ValidPipelineID(id) {
		return "", pipelineError(id, proto.ErrNotFound)
	}
	return id, nil
}

func (s *Server) createPipeline(w http.ResponseWriter, r *http.Request) error {
	request, err := decodeBody[api.PipelineRequest](s, w, r)
	if err != nil {
		return err
	}
	p, err := s.Pipelines.Parse(request.File)
	if err != nil {
		return err
	}
	key := infoOf(r.Context()).key
	if err := s.checkQuota(r.Context(), key.Org); err != nil {
		return err
	}
	p.ID, p.Org, p.Key, p.CreatedAt = proto.NewPipelineID(), key.Org, key.ID, time.Now().UTC()
	p.Commit, p.Branch, p.Secrets = request.Commit, request.Branch, request.Secrets
	if err := s.checkPipeline(r.Context(), p); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), versionsTimeout)
	defer cancel()
	state, err := s.Pipelines.Create(ctx, p, func(ctx context.Context) error {
		if request.ThreadID == "" {
			return nil
		}
		if _, err := s.Versions.Fork(ctx, p.Org, request.ThreadID, 0, p.ID); err != nil {
			return threadError("fork", request.ThreadID, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/pipelines/"+p.ID)
	return writeValue(w, http.StatusCreated, api.NewWholePipeline(p, state))
}

// checkPipeline refuses a run if one of its steps would be refused now, or if its secrets are not
// the ones that its steps name.
func (s *Server) checkPipeline(ctx context.Context, p *proto.Pipeline) error {
	if err := s.checkStepSecrets(ctx, p); err != nil {
		return err
	}
	for i := range p.Steps {
		step := &p.Steps[i]
		for j := range step.Cells {
			_, err := s.stepJob(ctx, p, i, j, proto.NewTraceID())
			if field, ok := errors.AsType[*proto.FieldError](err); ok {
				return proto.FieldErrorf("file", "step %s: %s", step.Name, field.Message)
			}
			known, ok := errors.AsType[*api.Error](err)
			if sandbox := step.Cells[j].Sandbox; ok && sandbox != "" && known.Code.Status() >= http.StatusInternalServerError {
				return proto.FieldErrorf("file", "step %s: the sandbox %q does not exist, or its image does not", step.Name, proto.Shorten(sandbox))
			}
			if ok {
				named := *known
				named.Message = "step " + step.Name + ": " + known.Message
				return &named
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// checkStepSecrets returns a [*proto.FieldError] with every secret that a step names and cannot
// have, or with one of the run that no step names.
func (s *Server) checkStepSecrets(ctx context.Context, p *proto.Pipeline) error {
	named, missing := map[string]bool{}, []string{}
	for i := range p.Steps {
		step := &p.Steps[i]
		if len(step.Secrets) == 0 {
			continue
		}
		for j := range step.Cells {
			var without []string
			key, _, err := s.stepKey(ctx, p, i, j)
			if err == nil {
				_, without, err = s.storedSecrets(ctx, p, step, key)
			}
			if _, ok := errors.AsType[*api.Error](err); ok {
				continue // stepJob returns it too, and its caller adds the name of the step
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
		return proto.FieldErrorf("secrets", "must have a value of %s; or an administrator stores a secret of this name, and binds it to the API key", strings.Join(missing, ", and of "))
	}
	for _, name := range slices.Sorted(maps.Keys(p.Secrets)) {
		if !named[name] {
			return proto.FieldErrorf("secrets", "has %s, which no step names", name)
		}
	}
	return nil
}

// storedSecrets returns the bindings of the secrets that a step names and the run has no value of.
// They bind the secret as a masked variable of that name, unless programs never get it. Only secrets bound to the key or to its
// sandbox are found, because everyone who may start a run could otherwise read every secret of the
// organisation. missing are the names that are not bound, or not stored.
func (s *Server) storedSecrets(ctx context.Context, p *proto.Pipeline, step *proto.PipelineStep, key *proto.Key) (bindings, missing []string, err error) {
	profile, err := s.profileOf(ctx, key)
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
		secret, err := s.Secrets.Get(ctx, key.Org, bound[i].Secret)
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

func (s *Server) listPipelines(w http.ResponseWriter, r *http.Request) error {
	answer := api.Pipelines{Pipelines: []api.Pipeline{}}
	for _, state := range s.Pipelines.List(infoOf(r.Context()).key.Org) {
		answer.Pipelines = append(answer.Pipelines, api.NewPipeline(&state))
	}
	return writeValue(w, http.StatusOK, answer)
}

func (s *Server) getPipelineSchema(w http.ResponseWriter, _ *http.Request) error {
	h := w.Header()
	jsonHeader(h)
	h.Set("Content-Type", "application/schema+json")
	_, _ = w.Write(s.Pipelines.Schema()) // the client may be gone
	return nil
}

func (s *Server) getPipeline(w http.ResponseWriter, r *http.Request) error {
	return s.answerPipeline(w, r, s.Pipelines.Get)
}

func (s *Server) cancelPipeline(w http.ResponseWriter, r *http.Request) error {
	return s.answerPipeline(w, r, s.Pipelines.Cancel)
}

// answerPipeline answers with a run in the state that read returns.
func (s *Server) answerPipeline(w http.ResponseWriter, r *http.Request, read func(context.Context, string, string) (*proto.PipelineState, error)) error {
	id, err := pipelineID(r)
	if err != nil {
		return err
	}
	org := infoOf(r.Context()).key.Org
	state, err := read(r.Context(), org, id)
	if err != nil {
		return pipelineError(id, err)
	}
	p, err := s.Pipelines.Definition(r.Context(), org, id)
	if err != nil {
		return pipelineError(id, err)
	}
	return writeValue(w, http.StatusOK, api.NewWholePipeline(p, state))
}

// StartStep starts the execution of a cell of a run in a thread, unless it was started before, and
// returns its id. refused is the reason why it will never start, empty if it did. After an error it
// may have started.
func (s *Server) StartStep(ctx context.Context, p *proto.Pipeline, step, cell int, thread string) (id proto.TraceID, refused string, err error) {
	id = proto.NewTraceID()
	ctx, span := s.startBackgroundSpan(ctx, id, "step", p.Org, p.Key)
	defer func() { endBackgroundSpan(span, err) }()
	job, err := s.stepJob(ctx, p, step, cell, id)
	if err != nil {
		refused, err := stepRefusal(err)
		return "", refused, err
	}
	job.ThreadID = thread
	id, err = s.submitNew(ctx, &proto.Submission{
		Job: job, IdempotencyKey: fmt.Sprintf("%s %d %d", p.ID, step, cell), BodyHash: p.ID, WaitUntil: time.Now().Add(stepWait),
	})
	if err != nil {
		refused, err := stepRefusal(err)
		return "", refused, err
	}
	return id, "", nil
}

// stepRefusal returns the reason for which a cell will never start, or an error that may pass.
func stepRefusal(err error) (refused string, _ error) {
	_, known := errors.AsType[*api.Error](err) // a broken sandbox is an internal error for clients
	_, field := errors.AsType[*proto.FieldError](err)
	if known || field {
		return toAPI(err, &entitlement{}).Message, nil
	}
	return "", err
}

// StepSpace returns the largest size of the home of a cell. refused is the reason why the cell will
// never start, empty if it may.
func (s *Server) StepSpace(ctx context.Context, p *proto.Pipeline, step, cell int) (most proto.Space, refused string, err error) {
	var profile proto.Profile
	key, _, err := s.stepKey(ctx, p, step, cell)
	if err == nil {
		profile, err = s.profileOf(ctx, key)
	}
	if err != nil {
		refused, err = stepRefusal(err)
		return most, refused, err
	}
	return proto.Space{Bytes: int64(profile.Disk.Home), Files: profile.Disk.Inodes}, "", nil
}

// stepKey returns the API key of a run, bound to the sandbox profile of a cell.
func (s *Server) stepKey(ctx context.Context, p *proto.Pipeline, step, cell int) (*proto.Key, entitlement, error) {
	key, plan, err := s.validKey(ctx, p.Key)
	if err != nil {
		return nil, plan, err
	}
	sandbox := p.Steps[step].Cells[cell].Sandbox
	if sandbox == "" || sandbox == key.Sandbox {
		return key, plan, nil
	}
	// A global administrator may create a key for any sandbox. Others keep to their own.
	if !key.GlobalAdmin() {
		return nil, plan, api.Errorf(api.CodeForbidden, "the sandbox %q is not the one of this API key; only that of a global administrator may name another", proto.Shorten(sandbox))
	}
	bound := *key
	bound.Sandbox = sandbox
	return &bound, plan, nil
}

// stepJob returns the job of a cell, without its thread.
func (s *Server) stepJob(ctx context.Context, p *proto.Pipeline, step, cell int, id proto.TraceID) (*proto.Job, error) {
	key, plan, err := s.stepKey(ctx, p, step, cell)
	if err != nil {
		return nil, err
	}
	x := &p.Steps[step]
	env, err := stepEnv(p, x, &x.Cells[cell])
	if err != nil {
		return nil, err
	}
	request := &api.ExecuteRequest{Code: x.Code, Language: x.Language, Timeout: x.Timeout, Env: env, MaxAttempts: 1}
	if err := request.Validate(); err != nil {
		return nil, err
	}
	bindings, missing, err := s.storedSecrets(ctx, p, x, key)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 { // they were there when the run was accepted
		return nil, proto.FieldErrorf("secrets", "must have a value of %s, which is not stored any more, or not bound to the API key", strings.Join(missing, " and of "))
	}
	with := *key
	with.Secrets = slices.Concat(bindings, key.Secrets)
	job, err := s.newJob(ctx, request, client{key: &with, plan: plan}, proto.ModeAsync, id, 0)
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
func stepEnv(p *proto.Pipeline, step *proto.PipelineStep, cell *proto.MatrixCell) (map[string]string, error) {
	standard := map[string]string{"CI": "true", "CI_PIPELINE_ID": p.ID, "CI_STEP_NAME": step.Name}
	if p.Commit != "" {
		standard["CI_COMMIT_SHA"] = p.Commit
	}
	if p.Branch != "" {
		standard["CI_COMMIT_BRANCH"] = p.Branch
	}
	for name, value := range cell.Values {
		standard["MATRIX_"+strings.ToUpper(name)] = value
	}
	secrets := map[string]string{}
	for _, name := range step.Secrets {
		if value, ok := p.Secrets[name]; ok {
			secrets[name] = value
		}
	}
	return proto.MergeEnv(p.Env, step.Env, secrets, standard)
}
