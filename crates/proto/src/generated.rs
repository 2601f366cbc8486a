//! Messages generated from `crates/proto/proto` by `cargo xtask codegen`, and their descriptors.

#![allow(
    missing_docs,
    unused_qualifications,
    clippy::use_self,
    reason = "generated code keeps its generator's style; the .proto files carry the documentation"
)]

/// Package `evergreen`.
pub mod evergreen {
    /// Package `evergreen.v2`: the session protocol, as every client knows it.
    pub mod v2 {
        include!("generated/evergreen.v2.rs");
    }
}

/// Package `google`.
pub mod google {
    /// Package `google.rpc`: the error model of gRPC's status details.
    pub mod rpc {
        include!("generated/google.rpc.rs");
    }
}

/// Names of enumerations for JSON: protobuf's messages keep numbers.
mod enum_names {
    use serde::{Serialize, Serializer};

    use super::inference::{DataType, model_input::Format, model_instance_group::Kind};

    macro_rules! names {
        ($($field:ident: $Enum:ty;)*) => {$(
            pub(super) fn $field<S: Serializer>(number: &i32, serializer: S) -> Result<S::Ok, S::Error> {
                let known = <$Enum>::try_from(*number).unwrap_or_default();
                known.as_str_name().serialize(serializer)
            }
        )*};
    }

    names! {
        data_type: DataType;
        input_format: Format;
        instance_kind: Kind;
    }
}

/// Package `inference`: the KServe v2 protocol over gRPC, with its extensions.
pub mod inference {
    include!("generated/inference.rs");
}

/// Package `sapwood`.
pub mod sapwood {
    /// Package `sapwood.v1`: our own messages, carried inside `google.protobuf.Any`.
    pub mod v1 {
        include!("generated/sapwood.v1.rs");
    }
}

/// Encoded `google.protobuf.FileDescriptorSet` of the `.proto` files of Evergreen and of what travels in its `Any`s,
/// imports included, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!("generated/descriptors.binpb");

/// The same of package `inference`.
pub const INFERENCE_DESCRIPTORS: &[u8] = include_bytes!("generated/inference.binpb");

#[cfg(test)]
mod tests;
