package admission_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
	"github.com/bullpen-run/bullpen/proto/api"
)

// ended and waits are the two answers of [proto.Final].
const (
	ended = true
	waits = false
)

// answers has a row for each reason, each error type and each error value of package proto: whether it
// can go away, and the status that a client gets.
var answers = map[string]struct {
	err    error
	final  bool
	status int
}{
	"RejectedConcurrency":    {reject(proto.RejectedConcurrency), waits, 429},
	"RejectedKeyConcurrency": {reject(proto.RejectedKeyConcurrency), waits, 429},
	"RejectedQueueFull":      {reject(proto.RejectedQueueFull), waits, 429},
	"RejectedPipelines":      {reject(proto.RejectedPipelines), waits, 429},
	"RejectedSandboxes":      {reject(proto.RejectedSandboxes), waits, 429},
	"RejectedUnavailable":    {reject(proto.RejectedUnavailable), waits, 503},
	"RejectedDiskFull":       {reject(proto.RejectedDiskFull), waits, 503},
	"RejectedStorage":        {reject(proto.RejectedStorage), waits, 503},
	"RejectedNoWorker":       {reject(proto.RejectedNoWorker), ended, 503},
	"RejectedKey":            {reject(proto.RejectedKey), ended, 403},
	"RejectedScope":          {reject(proto.RejectedScope), ended, 403},
	"RejectedNoOrg":          {reject(proto.RejectedNoOrg), ended, 500},
	"RejectedDeleted":        {reject(proto.RejectedDeleted), ended, 403},
	"RejectedSuspended":      {reject(proto.RejectedSuspended), ended, 403},
	"RejectedNoPlan":         {reject(proto.RejectedNoPlan), ended, 500},
	"RejectedMode":           {reject(proto.RejectedMode), ended, 429},
	"RejectedTimeout":        {reject(proto.RejectedTimeout), ended, 429},
	"RejectedKeyTimeout":     {reject(proto.RejectedKeyTimeout), ended, 429},
	"RejectedQuota":          {reject(proto.RejectedQuota), ended, 429},
	"RejectedNoProfile":      {reject(proto.RejectedNoProfile), ended, 409},
	"RejectedNoImage":        {reject(proto.RejectedNoImage), ended, 409},
	"RejectedNoConnection":   {reject(proto.RejectedNoConnection), ended, 409},
	"RejectedNoSecret":       {reject(proto.RejectedNoSecret), ended, 409},
	"RejectedProfile":        {reject(proto.RejectedProfile), ended, 403},
	"RejectedImage":          {reject(proto.RejectedImage), ended, 403},
	"RejectedSubPath":        {reject(proto.RejectedSubPath), ended, 403},
	"RejectedLostMount":      {reject(proto.RejectedLostMount), ended, 409},
	"RejectedCredentials":    {reject(proto.RejectedCredentials), ended, 409},
	"Rejection":              {reject("a reason of a newer process"), waits, 503},

	"FieldError":              {proto.FieldErrorf("code", "is bad"), ended, 400},
	"BusyError":               {&proto.BusyError{}, waits, 409},
	"RemovingError":           {&proto.RemovingError{}, waits, 409},
	"RemovingConnectionError": {&proto.RemovingConnectionError{}, ended, 409},
	"StorageTestError":        {&proto.StorageTestError{}, ended, 409},
	"QuotaError":              {&proto.QuotaError{}, ended, 409},
	"PendingUploadsError":     {&proto.PendingUploadsError{}, ended, 409},
	"LayersError":             {&proto.LayersError{}, ended, 409},
	"StagedError":             {&proto.StagedError{}, ended, 409},
	"SpaceError":              {&proto.SpaceError{}, ended, 409},
	"CopyError":               {&proto.CopyError{}, ended, 409},
	"PathError":               {&proto.PathError{}, ended, 409},
	"FileChangedError":        {&proto.FileChangedError{}, ended, 409},
	"LastKeyError":            {&proto.LastKeyError{}, ended, 409},
	"BoundError":              {&proto.BoundError{}, ended, 409},
	"BoundConnectionError":    {&proto.BoundConnectionError{}, ended, 409},
	"PlanInUseError":          {&proto.PlanInUseError{}, ended, 409},
	"SecretInUseError":        {&proto.SecretInUseError{}, ended, 409},
	"ErrKeyReused":            {proto.ErrKeyReused, ended, 500}, // HTTP words it where the header is known
	"ErrNoJob":                {proto.ErrNoJob, ended, 500},     // so it does a dead letter

	// Whether the job was accepted is unknown, or another process decides.
	"ErrMayRun":            {proto.ErrMayRun, waits, 500},
	"ErrNotConfirmed":      {proto.ErrNotConfirmed, waits, 500},
	"ErrSubmissionPending": {proto.ErrSubmissionPending, waits, 409},
	"ErrConflict":          {proto.ErrConflict, waits, 409},

	// Failures of this side.
	"MissingSecretError": {&proto.MissingSecretError{}, waits, 500}, // admission makes a Rejection of it
	"HistoryError":       {&proto.HistoryError{}, waits, 503},
	"NoFileError":        {&proto.NoFileError{}, waits, 404},
	"NoDirectoryError":   {&proto.NoDirectoryError{}, waits, 500},
	"MatrixError":        {&proto.MatrixError{}, waits, 500},
	"LimitError":         {&proto.LimitError{}, waits, 500},
	"AttributesError":    {&proto.AttributesError{}, waits, 500},
	"DepthError":         {&proto.DepthError{}, waits, 500},
	"FileError":          {&proto.FileError{}, waits, 500},
	"NoVersionError":     {&proto.NoVersionError{}, waits, 404},
	"UploadsError":       {&proto.UploadsError{}, waits, 500},
	"ErrNotFound":        {proto.ErrNotFound, waits, 404},
	"ErrExists":          {proto.ErrExists, waits, 409},
	"ErrCorrupt":         {proto.ErrCorrupt, waits, 500},
	"ErrLost":            {proto.ErrLost, waits, 500},
	"ErrFenced":          {proto.ErrFenced, waits, 500},
	"ErrRunCancelled":    {proto.ErrRunCancelled, waits, 500},
	"ErrNoSecretsKey":    {proto.ErrNoSecretsKey, waits, 500},
	"ErrBadTraceID":      {proto.ErrBadTraceID, waits, 500},
	"ErrBadKeyForm":      {proto.ErrBadKeyForm, waits, 500},
	"ErrOutsideMount":    {proto.ErrOutsideMount, waits, 500}, // admission words both
	"ErrMountTooDeep":    {proto.ErrMountTooDeep, waits, 500},
	"context":            {context.DeadlineExceeded, waits, 503},
}

func reject(reason proto.Reason) error {
	return &proto.Rejection{
		Reason: reason, Missing: &proto.Missing{}, Plan: &proto.PlanLimit{Mode: proto.ModeAsync, Quota: &proto.QuotaUse{}},
	}
}

// Every surface and every engine gets the same answer to whether a refusal can go away, and what is told
// as permanent is final. An error of package proto without a row fails.
func TestFinal(t *testing.T) {
	for name, want := range answers {
		for _, err := range []error{want.err, fmt.Errorf("wrapped: %w", want.err)} {
			if got := proto.Final(err); got != want.final {
				t.Errorf("%s: final is %v", name, got)
			}
			e := api.NewError(err)
			if e.Code.Status() != want.status {
				t.Errorf("%s: status %d: %s", name, e.Code.Status(), e.Message)
			}
			if e.Permanent && !want.final {
				t.Errorf("%s is told as permanent and is not final", name)
			}
			if want.final && e.RetryAfter > 0 {
				t.Errorf("%s is final and clients are told to repeat the request", name)
			}
			unknown := strings.Contains(e.Message, "the queue cannot take this now")
			if unknown && name != "RejectedUnavailable" && name != "Rejection" {
				t.Errorf("%s has no words of its own", name)
			}
		}
		if errors.Is(want.err, context.Canceled) {
			t.Errorf("%s matches a cancelled context", name)
		}
	}
	mayRun := fmt.Errorf("%w: %w", proto.ErrMayRun, reject(proto.RejectedKey))
	if proto.Final(nil) || proto.Final(context.Canceled) || proto.Final(mayRun) {
		t.Error("no error, a cancelled context, or a job that may run is final")
	}
	for _, name := range errorsOf(t, "../../proto") {
		if _, ok := answers[name]; !ok {
			t.Errorf("proto.%s has no row in the table", name)
		}
	}
}

// errorsOf returns the names of the reasons, the error types and the error values of a package.
func errorsOf(t *testing.T, dir string) (names []string) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					value, ok := spec.(*ast.ValueSpec)
					if !ok {
						continue
					}
					for _, name := range value.Names {
						if kind, ok := value.Type.(*ast.Ident); ok && kind.Name == "Reason" || strings.HasPrefix(name.Name, "Err") {
							names = append(names, name.Name)
						}
					}
				}
			case *ast.FuncDecl:
				if decl.Name.Name == "Error" && decl.Recv != nil {
					names = append(names, receiver(decl))
				}
			}
		}
	}
	if len(names) < 50 {
		t.Fatalf("found %d errors only", len(names))
	}
	return names
}

func receiver(decl *ast.FuncDecl) string {
	of := decl.Recv.List[0].Type
	if pointer, ok := of.(*ast.StarExpr); ok {
		of = pointer.X
	}
	return of.(*ast.Ident).Name
}
