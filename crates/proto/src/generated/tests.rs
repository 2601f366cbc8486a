//! What was generated, against the tables and bytes that clients know.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

use super::INFERENCE_DESCRIPTORS;
use super::inference::infer_parameter::ParameterChoice;
use super::inference::model_infer_request::InferInputTensor;
use super::inference::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};

fn flag(name: &str) -> BTreeMap<String, InferParameter> {
    let parameter = InferParameter {
        parameter_choice: Some(ParameterChoice::BoolParam(true)),
    };
    [(name.to_owned(), parameter)].into()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: String = hex.split_whitespace().collect();
    let pairs = digits.as_bytes().chunks(2);
    pairs
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn tr_906_the_example_of_a_streamed_request_and_its_empty_final_response() {
    let request = ModelInferRequest {
        model_name: "m".into(),
        id: "7".into(),
        parameters: flag("triton_enable_empty_final_response"),
        inputs: vec![InferInputTensor {
            name: "text_input".into(),
            datatype: "BYTES".into(),
            shape: vec![1],
            ..InferInputTensor::default()
        }],
        raw_input_contents: vec![Bytes::from_static(b"\x02\0\0\0hi")],
        ..ModelInferRequest::default()
    };
    let expect = bytes(
        "0a 01 6d 1a 01 37 22 28 0a 22 74726974 6f6e5f65 6e61626c 655f656d 7074795f 66696e61 6c5f7265 73706f6e 7365
         12 02 08 01 2a 16 0a 0a 74657874 5f696e70 7574 12 05 4259544553 1a 01 01 3a 06 02000000 6869",
    );
    assert_eq!(request.encode_to_vec(), expect);
    assert_eq!(ModelInferRequest::decode(&*expect), Ok(request));

    let last = ModelStreamInferResponse {
        error_message: String::new(),
        infer_response: Some(ModelInferResponse {
            model_name: "m".into(),
            model_version: "1".into(),
            id: "7".into(),
            parameters: flag("triton_final_response"),
            ..ModelInferResponse::default()
        }),
    };
    let expect = bytes(
        "12 26 0a 01 6d 12 01 31 1a 01 37 22 1b 0a 15 74726974 6f6e5f66 696e616c 5f726573 706f6e73 65 12 02 08 01",
    );
    assert_eq!(last.encode_to_vec(), expect);
    assert_eq!(ModelStreamInferResponse::decode(&*expect), Ok(last));
}

/// Each method takes its `Request` and gives its `Response`; one streams.
#[test]
fn tr_901_the_services_names_are_those_of_the_table() {
    let pool = prost_reflect::DescriptorPool::decode(INFERENCE_DESCRIPTORS).unwrap();
    let service = pool
        .get_service_by_name("inference.GRPCInferenceService")
        .unwrap();
    let mut names = Vec::new();
    for method in service.methods() {
        let (name, streams) = (method.name().to_owned(), method.is_server_streaming());
        assert_eq!(method.is_client_streaming(), streams, "{name}");
        assert_eq!(streams, name == "ModelStreamInfer");
        let asked = if streams { "ModelInfer" } else { &name };
        assert_eq!(
            method.input().full_name(),
            format!("inference.{asked}Request")
        );
        assert_eq!(
            method.output().full_name(),
            format!("inference.{name}Response")
        );
        names.push(name);
    }
    names.sort();
    let mut expect = vec![
        "ServerLive",
        "ServerReady",
        "ModelReady",
        "ServerMetadata",
        "ModelMetadata",
        "ModelInfer",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
        "ModelStreamInfer",
    ];
    expect.sort_unstable();
    assert_eq!(names, expect);
}

/// The numbers that the tables give, where a wrong one would still encode and decode with itself.
#[test]
fn tr_703_field_numbers_are_those_of_the_tables() {
    let pool = prost_reflect::DescriptorPool::decode(INFERENCE_DESCRIPTORS).unwrap();
    for (message, fields) in FIELDS {
        let message = pool
            .get_message_by_name(&format!("inference.{message}"))
            .unwrap_or_else(|| panic!("{message}"));
        let found: Vec<String> = message
            .fields()
            .map(|field| format!("{} {}", field.number(), field.name()))
            .collect();
        assert_eq!(found.join(", "), *fields, "{}", message.full_name());
    }
    let types = pool.get_enum_by_name("inference.DataType").unwrap();
    let found: Vec<String> = types
        .values()
        .map(|value| value.name().trim_start_matches("TYPE_").to_owned())
        .collect();
    let expect =
        "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16";
    assert_eq!(found.join(" "), expect);
}

const FIELDS: &[(&str, &str)] = &[
    ("ModelReadyRequest", "1 name, 2 version"),
    ("ServerMetadataResponse", "1 name, 2 version, 3 extensions"),
    (
        "ModelMetadataResponse",
        "1 name, 2 versions, 3 platform, 4 inputs, 5 outputs",
    ),
    (
        "ModelMetadataResponse.TensorMetadata",
        "1 name, 2 datatype, 3 shape",
    ),
    (
        "InferParameter",
        "1 bool_param, 2 int64_param, 3 string_param, 4 double_param, 5 uint64_param",
    ),
    (
        "InferTensorContents",
        "1 bool_contents, 2 int_contents, 3 int64_contents, 4 uint_contents, 5 uint64_contents, 6 fp32_contents, \
         7 fp64_contents, 8 bytes_contents",
    ),
    (
        "ModelInferRequest",
        "1 model_name, 2 model_version, 3 id, 4 parameters, 5 inputs, 6 outputs, 7 raw_input_contents",
    ),
    (
        "ModelInferRequest.InferInputTensor",
        "1 name, 2 datatype, 3 shape, 4 parameters, 5 contents",
    ),
    (
        "ModelInferRequest.InferRequestedOutputTensor",
        "1 name, 2 parameters",
    ),
    (
        "ModelInferResponse",
        "1 model_name, 2 model_version, 3 id, 4 parameters, 5 outputs, 6 raw_output_contents",
    ),
    (
        "ModelInferResponse.InferOutputTensor",
        "1 name, 2 datatype, 3 shape, 4 parameters, 5 contents",
    ),
    (
        "ModelStreamInferResponse",
        "1 error_message, 2 infer_response",
    ),
    (
        "ModelConfig",
        "1 name, 2 platform, 3 version_policy, 4 max_batch_size, 5 input, 6 output, 7 instance_group, 14 parameters, \
         17 backend, 19 model_transaction_policy",
    ),
    (
        "ModelInput",
        "1 name, 2 data_type, 3 format, 4 dims, 6 is_shape_tensor, 7 allow_ragged_batch, 8 optional",
    ),
    (
        "ModelOutput",
        "1 name, 2 data_type, 3 dims, 4 label_filename, 6 is_shape_tensor",
    ),
    ("ModelVersionPolicy", "1 latest, 2 all, 3 specific"),
    (
        "ModelStatistics",
        "1 name, 2 version, 3 last_inference, 4 inference_count, 5 execution_count, 6 inference_stats, 7 batch_stats, \
         8 memory_usage, 9 response_stats",
    ),
    (
        "InferStatistics",
        "1 success, 2 fail, 3 queue, 4 compute_input, 5 compute_infer, 6 compute_output, 7 cache_hit, 8 cache_miss",
    ),
    (
        "InferResponseStatistics",
        "1 compute_infer, 2 compute_output, 3 success, 4 fail, 5 empty_response, 6 cancel",
    ),
    (
        "RepositoryIndexResponse.ModelIndex",
        "1 name, 2 version, 3 state, 4 reason",
    ),
    (
        "RepositoryModelLoadRequest",
        "1 repository_name, 2 model_name, 3 parameters",
    ),
    (
        "ModelRepositoryParameter",
        "1 bool_param, 2 int64_param, 3 string_param, 4 bytes_param",
    ),
    ("TraceSettingRequest", "1 settings, 2 model_name"),
    (
        "LogSettingsRequest.SettingValue",
        "1 bool_param, 2 uint32_param, 3 string_param",
    ),
];
