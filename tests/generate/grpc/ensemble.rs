//! Requests of NVIDIA's client of a TensorRT-LLM ensemble, and how it reads the responses (D-55).

use sapwood_proto::generate::Signature;

use super::*;

const PROMPT: &str = "one two three";

/// The inputs that the client always sends, for these prompts as one batch. By default it sends
/// `exclude_input_in_output` as false.
fn message(prompts: &[&str], stream: bool) -> ModelInferRequest {
    let rows = prompts.len();
    let mut message = ModelInferRequest {
        model_name: "ensemble".into(),
        ..ModelInferRequest::default()
    };
    let texts: Vec<u8> = prompts.iter().flat_map(|text| bytes(text)).collect();
    add(&mut message, "text_input", "BYTES", rows, texts);
    let each = |value: Vec<u8>| value.repeat(rows);
    let int = |value: i32| each(value.to_le_bytes().to_vec());
    add(&mut message, "max_tokens", "INT32", rows, int(100));
    add(
        &mut message,
        "stream",
        "BOOL",
        rows,
        each(vec![stream.into()]),
    );
    add(&mut message, "beam_width", "INT32", rows, int(1));
    let temperature = each(1.0_f32.to_le_bytes().to_vec());
    add(&mut message, "temperature", "FP32", rows, temperature);
    add(
        &mut message,
        "exclude_input_in_output",
        "BOOL",
        rows,
        each(vec![0]),
    );
    want(&mut message, "text_output");
    message
}

/// One element for each row, as a matrix of one column.
fn add(message: &mut ModelInferRequest, name: &str, datatype: &str, rows: usize, raw: Vec<u8>) {
    let rows = i64::try_from(rows).unwrap();
    message.inputs.push(tensor(name, datatype, &[rows, 1]));
    message.raw_input_contents.push(raw.into());
}

fn want(message: &mut ModelInferRequest, name: &str) {
    message.outputs.push(InferRequestedOutputTensor {
        name: name.into(),
        ..InferRequestedOutputTensor::default()
    });
}

/// A server whose model repeats the words of its prompt, with `compat` for these clients or without.
async fn ensemble(is_sent: bool) -> Running {
    let signature = is_sent.then(Signature::tensorrt_llm);
    let model = ModelOptions {
        signature,
        ..ModelOptions::default()
    };
    let config = Config {
        models: [("ensemble".to_owned(), model)].into(),
        ..Config::default()
    };
    Running::generating(kernel(&[("ensemble", script(Script::Words))]), config).await
}

/// The row, the choice and the text of a response, read as the client does: `output[0]`, `batch_index[0][0]`.
fn read(response: &ModelInferResponse) -> (i32, i32, String) {
    let slot = |name: &str| {
        response
            .outputs
            .iter()
            .position(|output| output.name == name)
    };
    let index = |name: &str| {
        slot(name).map_or(0, |slot| {
            assert_eq!(response.outputs[slot].shape, [1, 1], "{name}");
            let raw = &response.raw_output_contents[slot];
            i32::from_le_bytes(raw[..].try_into().unwrap())
        })
    };
    let text = slot("text_output").unwrap();
    assert_eq!(response.outputs[text].shape, [1], "a list of one");
    let raw = &response.raw_output_contents[text][4..];
    let text = String::from_utf8(raw.to_vec()).unwrap();
    (index("batch_index"), index("sequence_index"), text)
}

/// The whole text of each row and choice.
async fn texts(grpc: &mut Grpc, message: ModelInferRequest) -> Vec<Vec<String>> {
    let mut texts = vec![vec![String::new(); 2]; 3];
    for answer in grpc.all(vec![message]).await {
        assert_eq!(answer.error_message, "");
        let (row, choice, text) = read(&answer.infer_response.unwrap());
        texts[usize::try_from(row).unwrap()][usize::try_from(choice).unwrap()] += &text;
    }
    texts
}

#[tokio::test]
async fn d_55_the_default_request_of_the_ensembles_client_can_be_streamed() {
    for is_sent in [true, false] {
        let server = ensemble(is_sent).await;
        let mut grpc = Grpc::connect(&server).await;
        let received = texts(&mut grpc, message(&[PROMPT], true)).await;
        assert_eq!(received[0][0], PROMPT, "a stream never has the prompt");
        let received = texts(&mut grpc, message(&[PROMPT], false)).await;
        assert_eq!(
            received[0][0],
            PROMPT.repeat(2),
            "an answer as a whole has it"
        );
    }
}

/// TR-405: vLLM's clients are refused as vLLM's backend refuses them.
#[tokio::test]
async fn d_55_without_the_ensembles_inputs_a_prompt_in_a_stream_is_refused() {
    for (is_sent, expect) in [
        (
            false,
            "When streaming, `exclude_input_in_output` = False is not allowed.",
        ),
        (true, ""),
    ] {
        let server = ensemble(is_sent).await;
        let mut grpc = Grpc::connect(&server).await;
        let mut asked = message(&[PROMPT], true);
        let beam = asked
            .inputs
            .iter()
            .position(|input| input.name == "beam_width");
        asked.inputs.remove(beam.unwrap());
        asked.raw_input_contents.remove(beam.unwrap());
        let answers = grpc.all(vec![asked]).await;
        assert_eq!(answers[0].error_message, expect);
    }
}

#[tokio::test]
async fn d_55_each_response_has_its_sequence_index() {
    for (is_sent, stream) in [(true, true), (true, false), (false, true), (false, false)] {
        let server = ensemble(is_sent).await;
        let mut grpc = Grpc::connect(&server).await;
        let mut asked = message(&[PROMPT], stream);
        let two = 2_i32.to_le_bytes().to_vec();
        add(&mut asked, "num_return_sequences", "INT32", 1, two);
        want(&mut asked, "sequence_index");
        let reply = if stream {
            PROMPT.to_owned()
        } else {
            PROMPT.repeat(2)
        };
        let received = texts(&mut grpc, asked).await;
        assert_eq!(received[0], [reply.clone(), reply], "{is_sent} {stream}");
    }
}

/// TR-1307
#[tokio::test]
async fn d_55_each_response_has_its_batch_index() {
    let server = ensemble(true).await;
    let mut grpc = Grpc::connect(&server).await;
    let prompts = ["one two", "three", "four five six"];
    for stream in [true, false] {
        let mut asked = message(&prompts, stream);
        let two = 2_i32.to_le_bytes().repeat(prompts.len());
        add(&mut asked, "num_return_sequences", "INT32", 3, two);
        want(&mut asked, "batch_index");
        want(&mut asked, "sequence_index");
        let received = texts(&mut grpc, asked).await;
        let reply = prompts.map(|prompt| {
            let reply = if stream {
                prompt.to_owned()
            } else {
                prompt.repeat(2)
            };
            vec![reply.clone(), reply]
        });
        assert_eq!(received, reply, "{stream}");
    }
}

/// TR-401: an unsupported input is refused by name if it asks for something.
#[tokio::test]
async fn d_55_inputs_and_outputs_of_the_ensemble_are_accepted_or_refused_by_name() {
    let server = ensemble(true).await;
    let mut grpc = Grpc::connect(&server).await;
    let float = |value: f32| value.to_le_bytes().to_vec();
    let int = |value: i32| value.to_le_bytes().to_vec();
    for (name, datatype, raw) in [
        ("length_penalty", "FP32", float(0.5)),
        ("repetition_penalty", "FP32", float(1.1)),
        ("presence_penalty", "FP32", float(0.0)),
        ("frequency_penalty", "FP32", float(0.0)),
        ("top_p", "FP32", float(0.9)),
        ("top_k", "INT32", int(0)),
        ("min_tokens", "INT32", int(1)),
        ("end_id", "INT32", int(-1)),
        ("pad_id", "INT32", int(-1)),
        ("stop_words", "BYTES", bytes("")),
        ("bad_words", "BYTES", bytes("four")),
        ("embedding_bias_words", "BYTES", bytes("")),
        ("embedding_bias_weights", "FP32", float(0.0)),
        ("prompt_vocab_size", "INT32", int(0)),
        ("prompt_table_extra_id", "UINT64", vec![0; 8]),
        ("random_seed", "UINT64", vec![1; 8]),
        ("seed", "UINT64", vec![1; 8]),
        ("return_log_probs", "BOOL", vec![1]),
        ("return_context_logits", "BOOL", vec![0]),
        ("return_generation_logits", "BOOL", vec![0]),
        ("return_perf_metrics", "BOOL", vec![0]),
        ("num_draft_tokens", "INT32", int(4)),
        ("use_draft_logits", "BOOL", vec![1]),
    ] {
        let mut asked = message(&[PROMPT], true);
        add(&mut asked, name, datatype, 1, raw);
        let answer = grpc.all(vec![asked]).await.swap_remove(0);
        assert_eq!(answer.error_message, "", "{name}");
    }
    for (name, datatype, shape, raw) in [
        ("return_context_logits", "BOOL", &[1, 1][..], vec![1]),
        ("return_generation_logits", "BOOL", &[1, 1], vec![1]),
        ("return_perf_metrics", "BOOL", &[1, 1], vec![1]),
        ("decoder_text_input", "BYTES", &[1, 1], bytes("x")),
        ("embedding_bias_words", "BYTES", &[1, 1], bytes("x")),
        ("prompt_embedding_table", "FP16", &[1, 1, 2], vec![0; 4]),
        ("lora_task_id", "UINT64", &[1, 1], vec![1; 8]),
        ("lora_weights", "FP16", &[1, 1, 2], vec![0; 4]),
        ("lora_config", "INT32", &[1, 1, 3], vec![0; 12]),
        ("guided_decoding_guide", "BYTES", &[1, 1], bytes("{}")),
    ] {
        let mut asked = message(&[PROMPT], true);
        asked.inputs.push(tensor(name, datatype, shape));
        asked.raw_input_contents.push(raw.into());
        let answer = grpc.all(vec![asked]).await.swap_remove(0);
        assert_eq!(answer.error_message, format!("'{name}' is not supported"));
    }
    for name in ["context_logits", "kv_cache_reused_blocks"] {
        let mut asked = message(&[PROMPT], true);
        want(&mut asked, name);
        let answer = grpc.all(vec![asked]).await.swap_remove(0);
        assert_eq!(answer.error_message, format!("'{name}' is not supported"));
    }
    let mut beams = message(&[PROMPT], true);
    beams.raw_input_contents[3] = int(2).into();
    let answer = grpc.all(vec![beams]).await.swap_remove(0);
    assert_eq!(answer.error_message, "beam search is not supported");
}

/// TR-502, TR-1307: an event has its indices once, as numbers.
#[tokio::test]
async fn d_55_events_of_an_ensemble_have_batch_and_sequence_index() {
    let server = ensemble(true).await;
    let body = r#"{"text_input":["one two","three"],"max_tokens":9,"stream":true,"num_return_sequences":2,
        "exclude_input_in_output":false}"#;
    let mut wire = Wire::connect(server.address).await;
    let path = "/v2/models/ensemble/generate_stream";
    let answer = wire.post(path, body).await;
    let mut texts = vec![vec![String::new(); 2]; 2];
    assert_eq!(
        answer.text().matches("batch_index").count(),
        answer.events().len()
    );
    for event in answer.events() {
        let at = |name: &str| usize::try_from(event[name].as_u64().unwrap()).unwrap();
        let text = event["text_output"].as_str().unwrap();
        texts[at("batch_index")][at("sequence_index")] += text;
    }
    assert_eq!(
        texts,
        [vec!["one two".to_owned(); 2], vec!["three".into(); 2]]
    );
}
