package main

import (
	"context"
	"iter"
	"reflect"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/bullpen-run/bullpen/client"
	"github.com/bullpen-run/bullpen/proto/api"
)

// resourceCommands are the commands of a resource: see [api.Resource]. The flags of the commands that create
// and update objects are the fields of their bodies.
type resourceCommands[T, N, S any] struct {
	Create createCommand[T, N, S] `cmd:"" aliases:"add" help:"Create {one} (admin)."`
	List   listCommand[T, N, S]   `cmd:"" help:"List {many} (admin)."`
	Show   showCommand[T, N, S]   `cmd:"" help:"Show {one} (admin)."`
	Update updateCommand[T, N, S] `cmd:"" help:"Change {one} (admin)."`
	Remove removeCommand[T, N, S] `cmd:"" name:"rm" help:"Remove {one} (admin)."`
}

// commandsOf returns the commands of a resource.
func commandsOf[T, N, S any](r *api.Resource[T, N, S]) resourceCommands[T, N, S] {
	c := resourceCommand[T, N, S]{r}
	return resourceCommands[T, N, S]{
		Create: createCommand[T, N, S]{resourceCommand: c}, List: listCommand[T, N, S]{resourceCommand: c},
		Show: showCommand[T, N, S]{resourceCommand: c}, Update: updateCommand[T, N, S]{resourceCommand: c},
		Remove: removeCommand[T, N, S]{resourceCommand: c},
	}
}

// resourceCommand is the resource that a command is about.
type resourceCommand[T, N, S any] struct{ resource *api.Resource[T, N, S] }

// clientFor returns the methods of a client for the resource.
func (c *resourceCommand[T, N, S]) clientFor(cl *client.Client) client.Resource[T, N, S] {
	return client.ResourceOf(cl.Admin(), c.resource)
}

// print prints a table of objects.
func (c *resourceCommand[T, N, S]) print(p *page, objects ...T) {
	row := make([]any, len(c.resource.Columns))
	for i, column := range c.resource.Columns {
		row[i] = column.Head
	}
	p.row(row...)
	for i := range objects {
		for j, column := range c.resource.Columns {
			row[j] = column.Cell(&objects[i])
		}
		p.row(row...)
	}
}

// callAndPrint calls the server and prints the object that it answers with.
func (c *resourceCommand[T, N, S]) callAndPrint(
	s streams, r *remote, call func(client.Resource[T, N, S]) (*T, error),
) error {
	return request(s, r, func(cl *client.Client) (*T, error) { return call(c.clientFor(cl)) },
		func(p *page, object *T) { c.print(p, *object) })
}

type createCommand[T, N, S any] struct {
	resourceCommand[T, N, S] `kong:"-"`
	remote                   `embed:""`
	New                      N `embed:""`
}

func (c *createCommand[T, N, S]) Help() string {
	return c.resource.CreateDoc + "\n\nExample:\n\n  " + c.resource.Example
}

func (c *createCommand[T, N, S]) Run(ctx context.Context, s streams) error {
	return c.callAndPrint(s, &c.remote, func(r client.Resource[T, N, S]) (*T, error) { return r.Create(ctx, &c.New) })
}

type listCommand[T, N, S any] struct {
	resourceCommand[T, N, S] `kong:"-"`
	remote                   `embed:""`
	inOrg                    `embed:""`
}

func (c *listCommand[T, N, S]) Run(ctx context.Context, s streams) error {
	return list(s, &c.remote, func(cl *client.Client) iter.Seq2[T, error] { return c.clientFor(cl).List(ctx, c.Org) },
		func(p *page, objects []T) { c.print(p, objects...) })
}

// namedObject is the argument that names an object.
type namedObject struct {
	ID string `arg:"" help:"What the list prints in its first column."`
}

type showCommand[T, N, S any] struct {
	resourceCommand[T, N, S] `kong:"-"`
	remote                   `embed:""`
	namedObject              `embed:""`
}

func (c *showCommand[T, N, S]) Run(ctx context.Context, s streams) error {
	return c.callAndPrint(s, &c.remote, func(r client.Resource[T, N, S]) (*T, error) { return r.Get(ctx, c.ID) })
}

type updateCommand[T, N, S any] struct {
	resourceCommand[T, N, S] `kong:"-"`
	remote                   `embed:""`
	namedObject              `embed:""`
	Settings                 S `embed:""`
}

func (c *updateCommand[T, N, S]) Help() string {
	return "Resets omitted settings to their defaults. If the object changes at the same time, the command fails and " +
		"stores nothing. " + c.resource.ReplaceDoc
}

func (c *updateCommand[T, N, S]) Run(ctx context.Context, s streams) error {
	return c.callAndPrint(s, &c.remote, func(r client.Resource[T, N, S]) (*T, error) {
		return r.Edit(ctx, c.ID, func(settings *S) { *settings = c.Settings })
	})
}

type removeCommand[T, N, S any] struct {
	resourceCommand[T, N, S] `kong:"-"`
	remote                   `embed:""`
	namedObject              `embed:""`
}

func (c *removeCommand[T, N, S]) Help() string { return c.resource.RemoveDoc }

func (c *removeCommand[T, N, S]) Run(ctx context.Context, s streams) error {
	return c.callAndPrint(s, &c.remote, func(r client.Resource[T, N, S]) (*T, error) { return r.Remove(ctx, c.ID) })
}

// expandHelp names the resource in a help text.
func (c *resourceCommand[T, N, S]) expandHelp(text string) string {
	return strings.NewReplacer("{one}", c.resource.WithArticle(), "{many}", c.resource.PluralName()).Replace(text)
}

// completeHelp completes the help of resources. A flag that is a field of the API has the description of the
// field, and is required if the field is.
func completeHelp(k *kong.Kong) error {
	return kong.Visit(k.Model, func(node kong.Visitable, next kong.Next) error {
		switch node := node.(type) {
		case *kong.Command:
			if c, ok := reflect.TypeAssert[interface{ expandHelp(string) string }](node.Target.Addr()); ok {
				node.Help = c.expandHelp(node.Help)
			}
		case *kong.Flag:
			if node.Help == "" && node.Tag.Has("doc") {
				node.Help, node.PlaceHolder = node.Tag.Get("doc"), strings.ToUpper(node.Name)
				node.Required, node.HasDefault = !strings.Contains(node.Tag.Get("json"), ",omitempty"), false
			}
		}
		return next(nil)
	})
}
