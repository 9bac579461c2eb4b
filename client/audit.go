package client

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/bullpen-run/bullpen/proto/api"
)

const auditPath = adminPath + "/audit"

// maxAuditLine is the largest line of an export, in bytes.
const maxAuditLine = 4 << 20

func auditQuery(f *api.AuditFilter) url.Values {
	return url.Values{
		"org": {f.Org}, "actor": {f.Actor}, "action": {f.Action},
		"created_after": {timeText(f.From.Time)}, "created_before": {timeText(f.Before.Time)},
	}
}

// Audit returns the records of the audit log that match the filter, newest first.
func (a *Admin) Audit(ctx context.Context, filter api.AuditFilter) iter.Seq2[api.AuditRecord, error] {
	query := auditQuery(&filter)
	query.Set("limit", strconv.Itoa(maxPage))
	return pages[api.AuditRecord](ctx, a.client, auditPath, "records", query)
}

// ExportAudit returns the audit log's records that match the filter and have a sequence number
// above after, oldest first, as one JSON object per line.
func (a *Admin) ExportAudit(ctx context.Context, filter api.AuditFilter, after int64) (io.ReadCloser, error) {
	query := auditQuery(&filter)
	if after > 0 {
		query.Set("after", strconv.FormatInt(after, 10))
	}
	return a.exportAudit(ctx, query)
}

// ExportWholeAudit returns the whole audit log, for [VerifyAudit]. It needs the API key of a global
// administrator.
func (a *Admin) ExportWholeAudit(ctx context.Context) (io.ReadCloser, error) {
	return a.exportAudit(ctx, url.Values{"all": {"true"}})
}

func (a *Admin) exportAudit(ctx context.Context, query url.Values) (io.ReadCloser, error) {
	resp, err := a.client.do(ctx, call{
		method: http.MethodGet, path: withQuery(auditPath, query), header: map[string]string{"Accept": ndjson}, resend: true,
	})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// VerifyAuditLog asks the server to verify its audit log. If expect is not empty, one of the
// records must have this hash. It needs the API key of a global administrator. [VerifyAudit] does
// not trust the server.
func (a *Admin) VerifyAuditLog(ctx context.Context, expect string) (*api.AuditVerification, error) {
	return get[api.AuditVerification](ctx, a.client, call{
		method: http.MethodPost, path: auditPath + "/verify", resend: true, body: api.AuditVerifyRequest{Expect: expect},
	})
}

// VerifyAudit checks an export of the whole audit log. If expect is not empty, one of the records
// must have this hash. It returns what it has checked up to the first error.
func VerifyAudit(export io.Reader, expect string) (chain api.AuditChain, err error) {
	chain.Expect = expect
	lines := bufio.NewScanner(export)
	lines.Buffer(nil, maxAuditLine)
	for lines.Scan() {
		if _, err := chain.Add(lines.Bytes()); err != nil {
			return chain, err
		}
	}
	if err := lines.Err(); err != nil {
		return chain, fmt.Errorf("read the audit log after record %d: %w", chain.Last, err)
	}
	return chain, chain.End()
}
