//! Rust code from our `.proto` files, committed so that no build needs a protobuf compiler.
//!
//! It writes the messages and the descriptor sets in `proto`. There are no stubs: client and server use codecs of their own
//! (see `net::evergreen::grpc`). This is a separate package, so that `cargo xtask serve` need not build a protobuf compiler.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use prost::Message;
use prost_types::FileDescriptorSet;

/// One descriptor set: files to compile, relative to [`INCLUDE`], the generated code, and the path of the descriptors. Each
/// face has a set of its own, because reflection must not list a face that is not served.
struct Set {
    sources: &'static [&'static str],
    code: &'static [&'static str],
    descriptors: &'static str,
}

const SETS: [Set; 2] = [
    Set {
        sources: &[
            "evergreen/v2/evergreen_service.proto",
            "google/rpc/error_details.proto",
            "google/rpc/status.proto",
            "sapwood/v1/config.proto",
        ],
        code: &["evergreen.v2.rs", "google.rpc.rs", "sapwood.v1.rs"],
        descriptors: "descriptors.binpb",
    },
    Set {
        sources: &["inference/inference_service.proto"],
        code: &["inference.rs"],
        descriptors: "inference.binpb",
    },
];
/// Payloads: slices of the receive buffer instead of copies.
const SHARED_BYTES: [&str; 3] = [
    ".evergreen.v2.Chunk.data",
    ".inference.ModelInferRequest.raw_input_contents",
    ".inference.ModelInferResponse.raw_output_contents",
];
/// Responses that one builder makes as protobuf and as JSON: `server::faces::generate::metadata` and `repository`.
const JSON_MESSAGES: [&str; 17] = [
    ".inference.InferBatchStatistics",
    ".inference.InferResponseStatistics",
    ".inference.InferStatistics",
    ".inference.MemoryUsage",
    ".inference.ModelConfig",
    ".inference.ModelInput",
    ".inference.ModelInstanceGroup",
    ".inference.ModelMetadataResponse",
    ".inference.ModelOutput",
    ".inference.ModelParameter",
    ".inference.ModelStatistics",
    ".inference.ModelStatisticsResponse",
    ".inference.ModelTransactionPolicy",
    ".inference.ModelVersionPolicy",
    ".inference.RepositoryIndexResponse",
    ".inference.ServerMetadataResponse",
    ".inference.StatisticDuration",
];
/// Enumerations in them: numbers in protobuf, names in JSON.
const JSON_ENUMS: [(&str, &str); 4] = [
    (".inference.ModelInput.data_type", "data_type"),
    (".inference.ModelInput.format", "input_format"),
    (".inference.ModelInstanceGroup.kind", "instance_kind"),
    (".inference.ModelOutput.data_type", "data_type"),
];
/// The only `oneof` in them. JSON has the variant's name as a key of the enclosing message. Written without a leading dot,
/// because a path with one would also match the variants.
const JSON_CHOICE: &str = "ModelVersionPolicy.policy_choice";
const INCLUDE: &str = "crates/proto/proto";
const MESSAGES: &str = "crates/proto/src/generated";

/// The folder of this package.
///
/// It is not the one at compile time: checkouts that share a target folder share this binary.
#[expect(
    clippy::disallowed_methods,
    reason = "cargo's variable, not one of the server"
)]
fn package() -> Result<PathBuf> {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .context("start it with `cargo xtask codegen`")
}

/// Writes the generated files; with `--check`, only compares and names the stale ones.
///
/// # Errors
/// A `.proto` file that does not compile, a file that cannot be read or written, or, with `--check`, stale files.
fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let check = match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--check"] => true,
        _ => bail!("usage: cargo xtask codegen [--check]"),
    };
    let root = &package()?.join("../..");
    let files = generate(root)?;
    let mut stale = Vec::new();
    for (path, wanted) in &files {
        let path = root.join(path);
        if fs::read(&path).ok().as_ref() == Some(wanted) {
            continue;
        }
        if check {
            stale.push(path.display().to_string());
        } else {
            fs::write(&path, wanted).with_context(|| format!("write {}", path.display()))?;
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    bail!(
        "generated code is stale, run `cargo xtask codegen`: {}",
        stale.join(", ")
    )
}

/// Every generated file: its path below the root, and its content.
fn generate(root: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let out = fresh(&root.join("target/codegen"))?;
    let mut files = BTreeMap::new();
    for set in SETS {
        let descriptors = protox::compile(set.sources, [root.join(INCLUDE)])?;
        let mut config = prost_build::Config::new();
        config.bytes(SHARED_BYTES).btree_map(["."]).out_dir(&out);
        with_json(&mut config);
        config.compile_fds(descriptors.clone())?;
        for name in set.code {
            let code =
                fs::read(out.join(name)).with_context(|| format!("read generated {name}"))?;
            files.insert(Path::new(MESSAGES).join(name), code);
        }
        files.insert(
            Path::new(MESSAGES).join(set.descriptors),
            without_comments(descriptors).encode_to_vec(),
        );
    }
    Ok(files)
}

fn with_json(config: &mut prost_build::Config) {
    const SERIALIZE: &str = "#[derive(::serde::Serialize)]";
    for message in JSON_MESSAGES {
        config.message_attribute(message, SERIALIZE);
    }
    for (field, names) in JSON_ENUMS {
        let names = format!("#[serde(serialize_with = \"super::enum_names::{names}\")]");
        config.field_attribute(field, names);
    }
    config
        .enum_attribute(JSON_CHOICE, SERIALIZE)
        .enum_attribute(JSON_CHOICE, "#[serde(rename_all = \"snake_case\")]")
        .field_attribute(JSON_CHOICE, "#[serde(flatten)]");
}

fn fresh(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder.to_path_buf())
}

/// Reflection needs names and types; comments would double the size of what every binary carries.
fn without_comments(mut all: FileDescriptorSet) -> FileDescriptorSet {
    for file in &mut all.file {
        file.source_code_info = None;
    }
    all
}
