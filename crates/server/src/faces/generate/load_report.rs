//! The load of a model as a response header, for load balancers (TR-1003).

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use sapwood_kernel::Name;

use super::catalog::ModelCatalog;
use super::path::GenerateRoute;
use crate::auth::caller::Caller;
use crate::ops::metrics::WatchedEngine;

const ASKED: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const NOTIFIED: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// The format of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadReportFormat {
    Text,
    Json,
}

/// A request that asks for the load of its model.
pub(super) struct LoadReportRequest {
    form: LoadReportFormat,
    engine: WatchedEngine,
}

impl LoadReportRequest {
    /// The load report of a request's model, if it is asked for and known.
    pub(super) fn of(catalog: &ModelCatalog, route: &GenerateRoute, asked: &Parts) -> Option<Self> {
        // First, because nearly no request asks. Unknown formats get no header (TR-1003).
        let form = match asked.headers.get(ASKED)?.as_bytes() {
            b"text" => LoadReportFormat::Text,
            b"json" => LoadReportFormat::Json,
            _ => return None,
        };
        let (GenerateRoute::Generate(target)
        | GenerateRoute::GenerateStream(target)
        | GenerateRoute::Infer(target)) = route
        else {
            return None;
        };
        let caller = Caller::of(&asked.extensions).ok()?;
        let function: Name = catalog.known(caller, &target.model).ok()?.function;
        // A model without an engine of this process has no KV cache to report.
        let mut engines = catalog.shared.metrics.engines().into_iter();
        let engine = engines.find(|engine| *engine.name == *function)?;
        Some(Self { form, engine })
    }

    /// Adds the header with the present load.
    pub(super) fn add_header(&self, headers: &mut HeaderMap) {
        let stats = self.engine.stats();
        let (used, most) = (stats.cells_used.get(), stats.cells_total.get());
        // Of digits and ASCII words, which a header takes.
        if let Ok(value) = HeaderValue::try_from(render(self.form, used, most)) {
            headers.insert(NOTIFIED, value);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 tokens")]
fn render(form: LoadReportFormat, used: u64, most: u64) -> String {
    // A cache of size 0, before the model is loaded, must not divide by it: NaN is no number in JSON.
    let share = used as f64 / most.max(1) as f64;
    match form {
        LoadReportFormat::Text => format!(
            "TEXT named_metrics.kv_cache_utilization={share}, named_metrics.max_token_capacity={most}"
        ),
        LoadReportFormat::Json => format!(
            "JSON {{\"named_metrics\":{{\"kv_cache_utilization\":{share},\"max_token_capacity\":{most}}}}}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_1003_the_load_of_a_model_is_written_as_text_or_json() {
        let text =
            "TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=4096";
        assert_eq!(render(LoadReportFormat::Text, 1_024, 4_096), text);
        let json =
            "JSON {\"named_metrics\":{\"kv_cache_utilization\":0,\"max_token_capacity\":4096}}";
        assert_eq!(render(LoadReportFormat::Json, 0, 4_096), json);
        assert!(render(LoadReportFormat::Text, 0, 0).contains("utilization=0,"));
    }
}
