//! [`StartLine`]: the line of the log that says how a model was loaded, and why so.

use super::llama::{self, ContextSize};
use super::load::LoadOptions;
use super::load_error::LoadError;
use super::memory::{self, SavedSlotsLimit, readable};
use super::plan::{BatchReason, LoadPlan};
use super::window::SlidingWindow;
use crate::gguf::GgufHeader;
use crate::llama_options::{FlashAttention, LlamaOptions};

/// How a model was loaded. Whether it is served is decided when it is registered.
pub(super) struct StartLine<'a> {
    pub(super) name: &'a str,
    pub(super) header: &'a GgufHeader,
    pub(super) plan: &'a LoadPlan,
    pub(super) size: ContextSize,
    pub(super) options: &'a LoadOptions,
    pub(super) recurrent: bool,
    pub(super) sliding_window: u32,
    /// Layers that a GPU computes.
    pub(super) gpu_layers: u32,
    pub(super) saved_slots: &'a SavedSlotsLimit,
    /// Why answers may depend on what is computed beside them.
    pub(super) obstacle: Option<String>,
}

impl StartLine<'_> {
    /// Logs it.
    ///
    /// # Errors
    /// There are no kernels for this machine.
    pub(super) fn log(&self) -> Result<(), LoadError> {
        let (size, options) = (self.size, self.options);
        tracing::info!(
            model = self.name,
            kv_cache = %self.layout(),
            slots = self.slots(),
            kv_type = %self.kv_type(),
            flash_attention = flash_attention(&options.llama),
            sliding_window = self.sliding_window,
            batch = batch(size.batch_tokens, self.plan.batch),
            ubatch = size.ubatch_tokens,
            threads = %size.threads,
            saved_prefixes = readable(self.saved_slots.bytes() as u64),
            gpu_layers = self.gpu_layers,
            kernels = %llama::kernels()?,
            configured = options.llama.described(),
            lora = adapters(options),
            equal_answers = equal_answers(self.obstacle.as_deref()),
            "chose settings for this model and this machine"
        );
        Ok(())
    }

    /// Describes the KV cache, and why it was laid out so.
    fn layout(&self) -> String {
        let (header, plan, size) = (self.header, self.plan, self.size);
        let ContextSize { cells, slots, .. } = size;
        if self.recurrent {
            return format!("a state for each of {slots} slots");
        }
        let each = plan.context_tokens;
        let all = readable(memory::cache_bytes(header, size, plan.cache_types));
        let windows = match (size.swa_full, SlidingWindow::of(header)) {
            (false, Some(window)) => {
                let cells = size.window_cells(window.tokens);
                format!(", {cells} in all for sliding windows")
            }
            _ => String::new(),
        };
        if size.per_slot {
            let why = own_cells(plan.has_spare_cells(), self.options.cache_tokens);
            return format!("{each} cells for each of {slots} slots{windows}, {all}: {why}");
        }
        let bytes = memory::cell_bytes(header, plan.cache_types);
        let own = bytes
            .saturating_mul(u64::from(each))
            .saturating_mul(u64::from(slots));
        let own = readable(own);
        format!(
            "{cells} cells for all of {slots} slots{windows}, {all}: {each} for each would take {own}"
        )
    }

    /// Describes what slots are for.
    fn slots(&self) -> String {
        let running = self.options.parallel.min(self.size.slots);
        let kept = self.size.slots - running;
        let why = match self.options.kept_prefixes {
            Some(_) => "as configured",
            None if kept == 0 => "others are saved in memory",
            None => "as many as there is room for, up to the default",
        };
        format!("{running} for sequences that run (parallel), {kept} for cached prefixes: {why}")
    }

    fn kv_type(&self) -> String {
        let types = self.plan.cache_types;
        let llama = &self.options.llama;
        let is_set = llama.cache_type_k.is_some() || llama.cache_type_v.is_some();
        let why = if is_set {
            "as configured"
        } else {
            "the default"
        };
        let (keys, values) = (types.keys, types.values);
        if keys == values {
            return format!("{}: {why}", keys.name());
        }
        format!(
            "{} for keys, {} for values: {why}",
            keys.name(),
            values.name()
        )
    }
}

/// Why each slot has cells of its own.
fn own_cells(is_spare: bool, cache_tokens: Option<u32>) -> &'static str {
    match cache_tokens {
        _ if is_spare => "there is memory to spare",
        Some(_) => "cache_tokens has room for it",
        None => "it takes little memory, or no more than shared cells",
    }
}

/// The tokens of a batch, and why so many.
fn batch(tokens: u32, why: BatchReason) -> String {
    let why = match why {
        BatchReason::Configured => "as configured",
        BatchReason::Cpu => "the default where a CPU computes",
        BatchReason::WholeOnGpu => "a GPU computes all layers",
    };
    format!("{tokens}: {why}")
}

fn equal_answers(obstacle: Option<&str>) -> String {
    match obstacle {
        None => "yes".to_owned(),
        Some(why) => format!("not promised: {why}"),
    }
}

fn adapters(options: &LoadOptions) -> String {
    let named = options.lora.iter();
    let named = named.map(|it| {
        let unapplied = if it.apply { "" } else { " on request" };
        format!("{} x {}{unapplied}", it.shown_name(), it.scale)
    });
    named.collect::<Vec<_>>().join(", ")
}

fn flash_attention(options: &LlamaOptions) -> &'static str {
    match options.flash_attn {
        None => "where it is supported: the default",
        Some(FlashAttention::Auto) => "where it is supported: as configured",
        Some(FlashAttention::On) => "on: as configured",
        Some(FlashAttention::Off) => "off: as configured",
    }
}

#[cfg(test)]
mod tests {
    use super::super::random::{RandomModelShape, write};
    use super::*;

    fn line(text: &str, change: fn(&mut LoadOptions)) -> [String; 5] {
        let mut bytes = Vec::new();
        write(&mut bytes, &RandomModelShape::tiny(), 1).unwrap();
        let header = GgufHeader::read(&bytes[..]).unwrap();
        let mut options = LoadOptions {
            llama: serde_json::from_str(text).unwrap(),
            context_tokens: Some(512),
            parallel: 4,
            memory_bytes: Some(1 << 30),
            ..LoadOptions::default()
        };
        change(&mut options);
        let plan = LoadPlan::new(&header, &options).unwrap();
        let line = StartLine {
            name: "tiny",
            header: &header,
            size: plan.per_slot.unwrap_or(plan.together),
            plan: &plan,
            options: &options,
            recurrent: false,
            sliding_window: 0,
            gpu_layers: 0,
            saved_slots: &SavedSlotsLimit::take(options.memory_bytes, 0),
            obstacle: None,
        };
        let batch = batch(line.size.batch_tokens, plan.batch);
        let flash = flash_attention(&options.llama).to_owned();
        [line.layout(), line.slots(), line.kv_type(), batch, flash]
    }

    #[test]
    fn each_choice_has_its_reason() {
        let usual = line("{}", |_| {});
        let expected = [
            "512 cells for each of 36 slots, 5 MiB: it takes little memory, or no more than shared cells",
            "4 for sequences that run (parallel), 32 for cached prefixes: as many as there is room for, up to the default",
            "f16: the default",
            "512: the default where a CPU computes",
            "where it is supported: the default",
        ];
        assert_eq!(usual, expected);
        let set = r#"{"cache_type_k": "f32", "batch_tokens": 64, "flash_attn": "off"}"#;
        let set = line(set, |options| {
            options.cache_tokens = Some(2048);
            options.kept_prefixes = Some(0);
        });
        let expected = [
            "512 cells for each of 4 slots, 1 MiB: cache_tokens has room for it",
            "4 for sequences that run (parallel), 0 for cached prefixes: as configured",
            "f32 for keys, f16 for values: as configured",
            "64: as configured",
            "off: as configured",
        ];
        assert_eq!(set, expected);
        let [shared, ..] = line("{}", |options| options.cache_tokens = Some(1024));
        assert!(
            shared.starts_with("1024 cells for all of 36 slots"),
            "{shared}"
        );
        assert_eq!(own_cells(true, None), "there is memory to spare");
        let whole = batch(2048, BatchReason::WholeOnGpu);
        assert_eq!(whole, "2048: a GPU computes all layers");
        assert_eq!(equal_answers(None), "yes");
        assert_eq!(equal_answers(Some("a GPU")), "not promised: a GPU");
    }
}
