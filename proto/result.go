package proto

import "fmt"

// Result is what a program did, or why it did not run to its end: the inline body, and "result" in
// events and webhooks.
type Result struct {
	_ struct{} `doc:"What a program did, or why it did not run to its end."`

	Success              bool      `json:"success" doc:"Exactly exit_code == 0."`
	Stdout               string    `json:"stdout"`
	Stderr               string    `json:"stderr"`
	Results              []Display `json:"results,omitempty" maxItems:"100" doc:"What a program with rich has shown, in order: at most 4 MiB of JSON together, and no more than its sandbox keeps of stdout. Absent if there is nothing. An extension of the public contract."`
	ExitCode             int       `json:"exit_code" minimum:"-1" maximum:"255" doc:"128+N if signal N ended the program; -1 if the platform did."`
	Error                *string   `json:"error" doc:"null unless the platform ended the program."`
	ErrorCode            *string   `json:"error_code" format:"error-code"`
	ErrorMessage         *string   `json:"error_message" doc:"The error in a sentence, with the numbers."`
	ProgramExitCode      *int      `json:"program_exit_code,omitempty" doc:"The program's own exit code, with thread_save_error and storage_write_error, and with cancelled and timeout if it exited by itself after SIGTERM. Otherwise absent."`
	DurationMS           int64     `json:"duration_ms" minimum:"0" doc:"From the program's start to its end."`
	StdoutTruncated      bool      `json:"stdout_truncated"`
	StderrTruncated      bool      `json:"stderr_truncated"`
	ResultsTruncated     bool      `json:"results_truncated,omitempty" doc:"true if results are missing or incomplete because there were too many, or they were too large. Otherwise absent."`
	StdoutInvalidUTF8    bool      `json:"stdout_invalid_utf8,omitempty" doc:"true if stdout has bytes that are not UTF-8. Each is U+FFFD here; the exact bytes are at /v1/executions/{id}/output/stdout. Otherwise absent. An extension of the public contract."`
	StderrInvalidUTF8    bool      `json:"stderr_invalid_utf8,omitempty" doc:"The same of stderr."`
	OutputBudgetExceeded bool      `json:"output_budget_exceeded,omitempty" doc:"true if less output was kept than the sandbox allows, because the organisation had used up its hourly output budget, or the server's disk was full. Otherwise absent. An extension of the public contract."`
}

// Exited returns the result of a program that exited with code.
func Exited(code int) Result { return Result{Success: code == 0, ExitCode: code} }

// Signaled returns the result of a program that a signal killed.
func Signaled(signal int) Result { return Exited(128 + signal) }

// TimedOut returns the result of a program that exceeded its timeout, in seconds.
func TimedOut(timeout int) Result {
	text := fmt.Sprintf(errTimedOutAfterFormat, timeout)
	return platform(text, CodeTimeout,
		fmt.Sprintf("The program did not end within its timeout of %d s and was killed.", timeout))
}

// Cancelled returns the result of an execution that a client cancelled.
func Cancelled() Result {
	return platform(errCancelledByUser, CodeCancelled, "The execution was cancelled on request.")
}

// Failure returns the result of an execution that the platform ended. message is a sentence for the
// client.
func Failure(code ErrorCode, message string) Result { return platform(string(code), code, message) }

func platform(text string, code ErrorCode, message string) Result {
	c := string(code)
	return Result{ExitCode: -1, Error: &text, ErrorCode: &c, ErrorMessage: &message}
}

// Unsaved returns r changed for a home that could not be saved. message is a sentence for the
// client, appended to any message of r. The output, the duration and the program's own exit code
// stay.
func (r Result) Unsaved(message string) Result { return r.unstored(CodeThreadSave, message) }

// Unwritten returns r changed for writes to a mount that could not be stored. Otherwise it works
// like Unsaved.
func (r Result) Unwritten(message string) Result { return r.unstored(CodeStorageWrite, message) }

func (r Result) unstored(code ErrorCode, message string) Result {
	if r.ErrorMessage != nil {
		message = *r.ErrorMessage + " " + message
	}
	f := Failure(code, message)
	f.Stdout, f.Stderr, f.StdoutTruncated, f.StderrTruncated, f.DurationMS = r.Stdout, r.Stderr, r.StdoutTruncated,
		r.StderrTruncated, r.DurationMS
	f.StdoutInvalidUTF8, f.StderrInvalidUTF8 = r.StdoutInvalidUTF8, r.StderrInvalidUTF8
	f.Results, f.ResultsTruncated = r.Results, r.ResultsTruncated
	f.OutputBudgetExceeded, f.ProgramExitCode = r.OutputBudgetExceeded, r.ProgramExitCode
	if r.ErrorCode == nil {
		f.ProgramExitCode = &r.ExitCode
	}
	return f
}

// OutputBytes returns the size of the outputs and the results.
func (r *Result) OutputBytes() int { return len(r.Stdout) + len(r.Stderr) + sizeOf(r.Results) }

// WithoutOutput returns r without its outputs and results.
func (r Result) WithoutOutput() Result {
	r.Stdout, r.Stderr, r.Results = "", "", nil
	return r
}

// Status returns the terminal status of an execution with result r.
func (r Result) Status() Status {
	if r.ErrorCode == nil {
		if r.Success {
			return StatusSuccess
		}
		return StatusFailed
	}
	switch ErrorCode(*r.ErrorCode) {
	case CodeTimeout:
		return StatusTimeout
	case CodeCancelled:
		return StatusCancelled
	case CodeMemory:
		return StatusOOM
	case CodeSeccomp:
		return StatusSeccomp
	default:
		return StatusFailed
	}
}
