package proto_test

import (
	"strings"
	"testing"

	"github.com/bullpen-run/bullpen/proto"
)

func TestPathPatterns(t *testing.T) {
	matches := func(pattern, file string) bool {
		m := proto.NewPathMatcher([]string{"unrelated/x", pattern})
		for name := range strings.SplitSeq(file, "/") {
			var selected bool
			if m, selected = m.Enter(name); selected {
				return true
			}
		}
		return false
	}
	for _, test := range []struct{ pattern, yes, no string }{
		{"a", "a a/b a/b/c", "b aa b/a"},
		{"a/b", "a/b a/b/c", "a a/c b"},
		{"*.xml", "r0.xml x.xml/below", "a/r1.xml r0.txt"},
		{"**/*.xml", "r0.xml a/r1.xml a/b/r2.xml a/b/c/r3.xml", "r0.txt a/r1.txt"},
		{"a/**/r3.xml", "a/r3.xml a/b/c/r3.xml", "r3.xml b/r3.xml a/b/r2.xml"},
		{"a/**", "a/b a/b/c", "a b/a"},
		{"**", "a a/b .hidden", ""},
		{"**/a/**/b", "a/b x/a/y/b a/a/b a/b/b", "a b b/a"},
		{"a/**/**/b", "a/b a/x/b", "b"},
		{"a?/[x-z].txt", "ab/x.txt ac/z.txt", "a/x.txt ab/w.txt abc/x.txt"},
		{"[!a].txt", "b.txt !.txt", "a.txt"},
		{"x[^a]", "xb", "xa"},
		{`\[!a]`, "[!a]", "b"},
		{`\!a/\{b}/~c`, "!a/{b}/~c", "a/b"},
		{`a\*`, "a*", "ab"},
	} {
		clean, err := proto.CheckPathPattern(test.pattern)
		if err != nil {
			t.Errorf("%s: %v", test.pattern, err)
		}
		for file := range strings.FieldsSeq(test.yes) {
			if !matches(clean, file) {
				t.Errorf("%s does not match %s", test.pattern, file)
			}
		}
		for file := range strings.FieldsSeq(test.no) {
			if matches(clean, file) {
				t.Errorf("%s matches %s", test.pattern, file)
			}
		}
	}
	for _, wrong := range []string{
		"", ".", "..", "/a", "../a", "a/../..", "a**", "**.xml", "[", "!a", "~/.cache",
		"*.{a,b}", `\`, "**/**/**/**/**", strings.Repeat("a", 513),
	} {
		if _, err := proto.CheckPathPattern(wrong); err == nil {
			t.Errorf("%q is accepted", wrong)
		}
	}
}
