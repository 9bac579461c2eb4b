package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"image"
	_ "image/gif"  // pictures
	_ "image/jpeg" // pictures
	_ "image/png"  // pictures
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"github.com/charmbracelet/x/ansi/iterm2"
	"github.com/charmbracelet/x/ansi/kitty"
	"github.com/charmbracelet/x/ansi/sixel"

	"github.com/bullpen-run/bullpen/proto"
)

// pictureTypes are the types of pictures that are saved, the best first, with the extensions of their files. Values
// are base64, except for SVG.
var pictureTypes = []struct{ kind, extension string }{ // read only
	{"image/png", ".png"},
	{"image/jpeg", ".jpg"},
	{"image/gif", ".gif"},
	{"image/webp", ".webp"},
	{svgType, ".svg"},
	{"application/pdf", ".pdf"},
}

const svgType = "image/svg+xml"

// textTypes are the types of texts that are printed, the best first.
var textTypes = []string{"text/plain", "text/markdown", "text/latex", "application/json", "text/html"} // read only

// maxShownPixels is the size of the largest picture that is shown in a terminal.
const maxShownPixels = 16 << 20

// resultPrinter prints the texts of results and saves their pictures.
type resultPrinter struct {
	streams
	quiet    bool   // do not print the names of files
	prefix   string // of the names of files
	protocol graphics
	pictures int          // saved so far
	printed  map[int]bool // by index
}

// newResultPrinter returns the printer for a program's file. It saves pictures in dir.
func newResultPrinter(s streams, dir, program string) *resultPrinter {
	name := strings.TrimSuffix(filepath.Base(program), filepath.Ext(program))
	if program == "-" || name == "" {
		name = "result"
	}
	p := &resultPrinter{streams: s, prefix: filepath.Join(dir, name), printed: map[int]bool{}}
	if f, ok := s.out.(*os.File); ok && isTerminal(f) {
		p.protocol = graphicsOf(os.Getenv)
	}
	return p
}

// display prints the result with an index, unless a part of it is omitted here: rest prints it then.
func (p *resultPrinter) display(index int, d *proto.Display, omitted []string) error {
	if p.printed[index] || len(omitted) > 0 {
		return nil
	}
	p.printed[index] = true
	for _, t := range pictureTypes {
		if value, ok := d.Data[t.kind]; ok {
			return p.picture(t.kind, t.extension, value)
		}
	}
	return printText(p.out, d)
}

// rest prints the results of a program that have not been printed.
func (p *resultPrinter) rest(r *proto.Result) error {
	for i := range r.Results {
		if err := p.display(i, &r.Results[i], nil); err != nil {
			return err
		}
	}
	if r.ResultsTruncated {
		p.errorf("some results are missing or incomplete: there were too many, or they were too large")
	}
	return nil
}

// picture saves a picture, and shows it if the terminal can.
func (p *resultPrinter) picture(kind, extension string, value json.RawMessage) error {
	var text string
	if err := json.Unmarshal(value, &text); err != nil {
		return fmt.Errorf("decode a picture: %w", err)
	}
	content := []byte(text)
	if kind != svgType {
		var err error
		if content, err = base64.StdEncoding.DecodeString(text); err != nil {
			return fmt.Errorf("decode a picture: %w", err)
		}
	}
	p.pictures++
	name := fmt.Sprintf("%s-%d%s", p.prefix, p.pictures, extension)
	err := os.MkdirAll(filepath.Dir(name), 0o755) //nolint:gosec // as mkdir makes them; the umask decides
	if err != nil {
		return fmt.Errorf("save a picture: %w", err)
	}
	err = os.WriteFile(name, content, 0o644) //nolint:gosec // what the umask leaves, as any program's files
	if err != nil {
		return fmt.Errorf("save a picture: %w", err)
	}
	if err := p.protocol.show(p.out, content); err != nil {
		return err
	}
	if !p.quiet {
		p.errorf("saved %s", name)
	}
	return nil
}

// printText prints the best text of a result.
func printText(w io.Writer, d *proto.Display) error {
	text := resultText(d)
	if text == "" {
		return nil
	}
	_, err := io.WriteString(w, strings.TrimSuffix(text, "\n")+"\n")
	return err
}

// resultText returns the best text of a result, "" if it has none.
func resultText(d *proto.Display) string {
	for _, kind := range textTypes {
		value, ok := d.Data[kind]
		if !ok {
			continue
		}
		var text string
		if json.Unmarshal(value, &text) != nil {
			return string(value)
		}
		return text
	}
	return ""
}

// graphics is the protocol with which a terminal shows pictures; "" if it cannot.
type graphics string

const (
	kittyGraphics graphics = "kitty"
	itermGraphics graphics = "iTerm2"
	sixelGraphics graphics = "sixel"
)

// graphicsOf returns the protocol of the terminal that the environment describes. Asking the terminal itself could
// take long, or never end.
func graphicsOf(env func(string) string) graphics {
	term, program := env("TERM"), env("TERM_PROGRAM")
	switch {
	case env("TMUX") != "", strings.HasPrefix(term, "screen"), strings.HasPrefix(term, "tmux"):
		return "" // it does not pass pictures on, and the other variables are those of the terminal around it
	case program == "iTerm.app", program == "WezTerm", program == "mintty", env("LC_TERMINAL") == "iTerm2":
		return itermGraphics
	case env("KITTY_WINDOW_ID") != "", term == "xterm-kitty", term == "xterm-ghostty", program == "ghostty":
		return kittyGraphics
	case term == "foot", strings.HasPrefix(term, "foot-"), strings.HasPrefix(term, "mlterm"), term == "contour",
		strings.Contains(term, "sixel"):
		return sixelGraphics
	default:
		return ""
	}
}

// show writes a picture to a terminal. Pictures that cannot be decoded, such as SVG, are not shown.
func (g graphics) show(w io.Writer, content []byte) error {
	config, _, err := image.DecodeConfig(bytes.NewReader(content))
	if err != nil {
		return nil //nolint:nilerr // the file is saved as it is
	}
	if g == "" || config.Width <= 0 || config.Height <= 0 || config.Width > maxShownPixels/config.Height {
		return nil
	}
	picture, _, err := image.Decode(bytes.NewReader(content))
	if err != nil {
		return nil //nolint:nilerr // the file is saved as it is
	}
	var b bytes.Buffer
	switch g {
	case kittyGraphics:
		const noAnswers = 2
		err = kitty.EncodeGraphics(&b, picture, &kitty.Options{
			Action: kitty.TransmitAndPut, Transmission: kitty.Direct, Format: kitty.PNG, Quiet: noAnswers, Chunk: true,
		})
	case itermGraphics:
		b.WriteString(ansi.ITerm2(iterm2.File{
			Inline: true, Size: int64(len(content)), Content: []byte(base64.StdEncoding.EncodeToString(content)),
		}))
	case sixelGraphics:
		var pixels bytes.Buffer
		err = new(sixel.Encoder).Encode(&pixels, picture)
		b.WriteString(ansi.SixelGraphics(0, 1, 0, pixels.Bytes()))
	}
	if err != nil {
		return fmt.Errorf("show a picture: %w", err)
	}
	b.WriteByte('\n')
	_, err = w.Write(b.Bytes())
	return err
}

// printResults prints the texts of the results of an execution.
func printResults(p *page, results []proto.Display, truncated bool) {
	if len(results) > 0 {
		p.textf("\n--- results\n")
	}
	for i := range results {
		p.textf("%s\n", strings.TrimSuffix(resultText(&results[i]), "\n"))
	}
	if truncated {
		p.textf("--- results are truncated: there were too many, or they were too large\n")
	}
}
