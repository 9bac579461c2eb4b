package api

import (
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestDecodeExecuteRequest(t *testing.T) {
	got, err := Decode[ExecuteRequest](
		[]byte(`{"code":"x","language":"bash","timeout":9,"thread_id":"t","metadata":{"a":"b"},` +
			`"webhook_url":"https://e.com/",` +
			`"env_vars":{"A":"\u00e9"},"max_attempts":3,"sub_paths":["/data/s/p"],"args":["-x","",""],"stdin":"a\nb",` +
			`"unknown":[{"code":1}]}`))
	want := &ExecuteRequest{
		Code: "x", Language: proto.Bash, Timeout: 9, ThreadID: "t", Metadata: map[string]string{"a": "b"},
		WebhookURL: "https://e.com/",
		Env:        map[string]string{"A": "é"}, MaxAttempts: 3, SubPaths: []string{"/data/s/p"},
		Args: []string{"-x", "", ""}, Stdin: "a\nb",
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = Decode[ExecuteRequest]([]byte(` { "\u0063ode" : "x" , "timeout":null } `))
	if err != nil || !reflect.DeepEqual(
		got, &ExecuteRequest{Code: "x", Language: proto.Python, Timeout: 60, MaxAttempts: 1}) {
		t.Errorf("defaults: %+v, %v", got, err)
	}
	got, err = Decode[ExecuteRequest]([]byte(`{"code":"x","timeout":99999999999999999999}`))
	if err != nil || got.Timeout != math.MaxInt {
		t.Errorf("a huge timeout must meet the plan's limit: %+v, %v", got, err)
	}
}

func TestFieldErrorsNameTheirField(t *testing.T) {
	for body, want := range map[string]proto.FieldError{
		``:   {Field: "body", Message: "body must be a JSON object, but it is empty"},
		`[]`: {Field: "body", Message: "body must be a JSON object"},
		`{} {}`: {
			Field: "body", Message: "body must be one JSON object: invalid character '{' after top-level value (at byte 4)",
		},
		`{}`:                              {Field: "code", Message: "code must be between 1 byte and 1 MB"},
		`{"code":{}}`:                     {Field: "code", Message: "code must be a string"},
		`{"code":"\udfff"}`:               {Field: "code", Message: `code must not contain a lone surrogate (\udfff)`},
		`{"code":"\uD800\uD800"}`:         {Field: "code", Message: `code must not contain a lone surrogate (\ud800)`},
		`{"code":"1","metadata":{"a":1}}`: {Field: "metadata.a", Message: "metadata.a must be a string"},
		`{"code":"1","\ud800":1}`:         {Field: "�", Message: `� must not contain a lone surrogate (\ud800)`},
		`{"code":"1","\u0063ode":"2"}`:    {Field: "code", Message: "code must be given only once"},
		`{"code":null,"code":"2"}`:        {Field: "code", Message: "code must be given only once"},
		`{"code":"1","env_vars":{"A":"1","A":"1"}}`: {
			Field: "env_vars.A", Message: "env_vars.A must be given only once",
		},
		`{"code":"1","metadata":{"a":"1","a":"2"}}`: {
			Field: "metadata.a", Message: "metadata.a must be given only once",
		},
		"{\"code\":\"1\xed\xa0\x80\"}": {
			Field: "code", Message: "code must be valid UTF-8",
		},
		`{"code":"1","args":"-x"}`: {
			Field: "args", Message: "args must be an array of strings",
		},
		`{"code":"1","args":["-x",1]}`: {
			Field: "args", Message: "args must be an array of strings",
		},
		`{"code":"1","args":["a\u0000b"]}`: {
			Field: "args", Message: "args must not contain NUL",
		},
		`{"code":"1","args":["` + strings.Repeat("x", proto.MaxArgsBytes) + `","x"]}`: {
			Field: "args", Message: "args must have at most 65536 bytes together",
		},
		`{"code":"1","args":[""` + strings.Repeat(`,""`, 256) + `]}`: {
			Field: "args", Message: "args must have at most 256 entries",
		},
		`{"code":"1","run_at":"tomorrow"}`: {
			Field: "run_at", Message: "run_at must be a time in RFC 3339, such as 2026-01-31T12:00:00Z",
		},
		`{"code":"1","run_at":5}`: {
			Field: "run_at", Message: "run_at must be a string",
		},
		`{"code":"1","delay":-1}`: {
			Field: "delay", Message: "delay must be 0 to 2592000 seconds",
		},
		`{"code":"1","delay":"5"}`: {
			Field: "delay", Message: "delay must be a number of seconds",
		},
		`{"code":"1","delay":5,"run_at":"2026-01-31T12:00:00Z"}`: {
			Field: "delay", Message: "delay must not be given together with run_at",
		},
		`{"code":"1","profile":"Web"}`: {
			Field: "profile", Message: "profile must be 1 to 63 characters of a-z, 0-9, ., _ and -, the first a letter or digit",
		},
		`{"code":"1","stdin":[]}`: {
			Field: "stdin", Message: "stdin must be a string",
		},
		`{"code":"1","stdin":"` + strings.Repeat("x", proto.MaxStdinBytes+1) + `"}`: {
			Field: "stdin", Message: "stdin must be at most 1048576 bytes",
		},
	} {
		if _, err := Decode[ExecuteRequest]([]byte(body)); err == nil {
			t.Errorf("%s is accepted", body)
		} else if got := new(proto.FieldError); !errors.As(err, &got) ||
			(*got != want && !strings.Contains(body, `\ud800":`)) {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestHash(t *testing.T) {
	hash := func(body string) string {
		r, err := Decode[ExecuteRequest]([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		h, err := r.Hash()
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first := hash(`{"code":"1","env_vars":{"A":"1","B":"2"}}`)
	if first != hash(` {"env_vars":{"B":"2","A":"\u0031"}, "timeout":60, "args":[], "stdin":"", "profile":"",`+
		`"language":"python","code":"1","thread_id":null}`) {
		t.Error("the same request has two hashes")
	}
	// What earlier versions stored must still match.
	if want := "7f31586cd53790715ecd4b83032eef31455f721ffb3f7207e146e323d902bdc5"; first != want {
		t.Errorf("hash %s, want %s", first, want)
	}
	for _, other := range []string{
		`{"code":"2"}`, `{"code":"1"}`, `{"code":"1","env_vars":{"A":"1","B":"2"},"timeout":61}`,
		`{"code":"1","env_vars":{"A":"1","B":"2"},"profile":"web"}`,
		`{"code":"1","env_vars":{"A":"1","B":"2"},"args":["x"]}`, `{"code":"1","env_vars":{"A":"1","B":"2"},"stdin":"x"}`,
	} {
		if first == hash(other) {
			t.Errorf("%s has the same hash", other)
		}
	}
}

func FuzzDecodeExecuteRequest(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `null`, `[`, `{"code":"1"}`, `{"code":"\ud83d\ude00","timeout":3}`, `{"code":"\ud800"}`,
		`{"code":"1","x":[[{"}":"]"}]]}`,
		`{"code":"1","metadata":{"a":"b"},"env_vars":{"A":"b"},"sub_paths":["/data/a/b"],"webhook_url":"https://e.com"}`,
		`{"code":"1","args":["a"],"stdin":"b"}`, "{\"code\":\"\xff\"}",
		`{"code":"1","timeout":-0,"max_attempts":10}`, `{"code":"\\\"\u0000"}`, `{"code" :"a" , "code": "b"}`,
		`{"":"\ud800"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := Decode[ExecuteRequest](body)
		if err != nil {
			if field := new(proto.FieldError); !errors.As(err, &field) || field.Field == "" ||
				!strings.HasPrefix(field.Message, field.Field) {
				t.Fatalf("error %#v", err)
			}
			return
		}
		// encoding/json decodes the same program from the body.
		var plain struct{ Code string }
		members := map[string]json.RawMessage{}
		if err := json.Unmarshal(body, &members); err != nil {
			t.Fatalf("accepted, but %v", err)
		}
		if err := json.Unmarshal(members["code"], &plain.Code); err != nil || plain.Code != r.Code {
			t.Fatalf("code %q, want %q (%v)", r.Code, plain.Code, err)
		}
		if len(r.Code) < 1 || len(r.Code) > proto.MaxCodeBytes || r.Timeout < 1 || r.MaxAttempts < 1 || r.MaxAttempts > 10 {
			t.Fatalf("accepted %+v", r)
		}
		for name, value := range r.Env {
			if err := proto.CheckEnv("env_vars", name, value); err != nil {
				t.Fatal(err)
			}
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		second, err := Decode[ExecuteRequest](again)
		if err != nil {
			t.Fatalf("%s: %v", again, err)
		}
		if len(r.Env) == 0 && len(r.Metadata) == 0 {
			r.Env, r.Metadata = second.Env, second.Metadata
		}
		one, _ := r.Hash()
		two, _ := second.Hash()
		if one != two || r.Code != second.Code {
			t.Fatalf("%+v, decoded again %+v", r, second)
		}
	})
}

func TestShorten(t *testing.T) {
	if got := proto.Shorten(strings.Repeat("é", 100)); got != strings.Repeat("é", 32)+"…" {
		t.Errorf("%q", got)
	}
	if got := proto.Shorten("x" + strings.Repeat("é", 100)); got != "x"+strings.Repeat("é", 31)+"…" {
		t.Errorf("%q", got)
	}
	_, err := Decode[ExecuteRequest]([]byte(`{"code":"1","` + strings.Repeat("x", 10000) + `":"\ud800"}`))
	if err == nil || len(err.Error()) > 200 {
		t.Errorf("%v", err)
	}
}
