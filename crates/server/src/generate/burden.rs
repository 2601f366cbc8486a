//! How full a model is, told to balancers beside an answer (TR-1003).
//!
//! Owns: the two headers. Refuses to know: who counts; models that are computed elsewhere have nothing to tell.

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue};
use sapwood_engine::Engine;
use sapwood_kernel::Name;

use super::catalogue::Catalogue;
use super::path::Route;
use crate::caller::Caller;

const ASKED: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const TOLD: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// How it is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Text,
    Json,
}

/// A request that wants to be told.
pub(super) struct Burden {
    form: Form,
    engine: Engine,
}

impl Burden {
    /// What is to be told of the model that a request is for, if that is asked for and known.
    pub(super) fn of(catalogue: &Catalogue, route: &Route, asked: &Parts) -> Option<Self> {
        let form = match asked.headers.get(ASKED)?.as_bytes() {
            b"text" => Form::Text,
            b"json" => Form::Json,
            _ => return None,
        };
        let (Route::Generate(target) | Route::GenerateStream(target) | Route::Infer(target)) =
            route
        else {
            return None;
        };
        let caller = Caller::of(&asked.extensions).ok()?;
        let function: Name = catalogue.known(caller, &target.model).ok()?.function;
        let mut engines = catalogue.shared.metrics.engines().into_iter();
        let engine = engines.find(|engine| engine.info().name == *function)?;
        Some(Self { form, engine })
    }

    /// Tells how it is now.
    pub(super) fn tell(&self, headers: &mut HeaderMap) {
        let stats = self.engine.stats();
        let (used, most) = (stats.cells_used.get(), stats.cells_total.get());
        // Of digits and ASCII words, which a header takes.
        if let Ok(value) = HeaderValue::try_from(said(self.form, used, most)) {
            headers.insert(TOLD, value);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53 tokens")]
fn said(form: Form, used: u64, most: u64) -> String {
    let share = used as f64 / most.max(1) as f64;
    match form {
        Form::Text => format!(
            "TEXT named_metrics.kv_cache_utilization={share}, named_metrics.max_token_capacity={most}"
        ),
        Form::Json => format!(
            "JSON {{\"named_metrics\":{{\"kv_cache_utilization\":{share},\"max_token_capacity\":{most}}}}}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_1003_the_load_of_a_model_is_spelled_in_two_ways() {
        let text =
            "TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=4096";
        assert_eq!(said(Form::Text, 1_024, 4_096), text);
        let json =
            "JSON {\"named_metrics\":{\"kv_cache_utilization\":0,\"max_token_capacity\":4096}}";
        assert_eq!(said(Form::Json, 0, 4_096), json);
        assert!(said(Form::Text, 0, 0).contains("utilization=0,"));
    }
}
