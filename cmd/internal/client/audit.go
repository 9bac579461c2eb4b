package client

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/api"
)

const auditPath = "/v1/admin/audit"

// maxAuditLine is the largest line of an export, in bytes.
const maxAuditLine = 4 << 20

// AuditRecord is a record of the audit log.
type AuditRecord = api.AuditRecord

// AuditChain is what a verification has checked.
type AuditChain = api.AuditChain

// Audit returns up to limit records of the audit log that match the filters, the newest first. The
// query has the filters as the API names them.
func (c *Client) Audit(ctx context.Context, filters url.Values, limit int) ([]AuditRecord, error) {
	all := []AuditRecord{}
	query := maps.Clone(filters)
	for {
		query.Set("limit", strconv.Itoa(min(limit-len(all), maxPage)))
		page, _, err := get[api.AuditRecords](ctx, c, call{method: http.MethodGet, path: auditPath + "?" + query.Encode(), resend: true})
		if err != nil {
			return nil, err
		}
		all = append(all, page.Records...)
		if page.NextCursor == nil || len(all) >= limit {
			return all, nil
		}
		query.Set("cursor", *page.NextCursor)
	}
}

// ExportAudit returns the records of the audit log that match the filters, the oldest first, one in
// each line.
func (c *Client) ExportAudit(ctx context.Context, filters url.Values) (io.ReadCloser, error) {
	resp, err := c.do(ctx, call{method: http.MethodGet, path: auditPath + "?" + filters.Encode(), header: map[string]string{"Accept": ndjson}, resend: true})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// VerifyAudit checks an export of the whole audit log. If expect is not empty, one of the records
// must have this hash. It returns what it has checked up to the first error.
func VerifyAudit(export io.Reader, expect string) (chain AuditChain, err error) {
	found := expect == ""
	lines := bufio.NewScanner(export)
	lines.Buffer(nil, maxAuditLine)
	for lines.Scan() {
		record, err := chain.Add(lines.Bytes())
		if err != nil {
			return chain, err
		}
		found = found || record.Hash == expect
	}
	if err := lines.Err(); err != nil {
		return chain, fmt.Errorf("read the audit log after record %d: %w", chain.Last, err)
	}
	if !found {
		return chain, fmt.Errorf("no record has the hash %s: the end of the log was removed, or the log was replaced", expect)
	}
	return chain, nil
}
