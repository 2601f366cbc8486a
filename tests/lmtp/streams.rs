//! GENERATE and SCORE over a real engine.

use serde_json::json;

use super::{client, ids, of_parrot, stream, told};

/// LM-404, LM-405
#[tokio::test]
async fn lm_404_a_generate_says_its_tokens_and_the_end_of_the_sequence() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket
        .say(r#"GENERATE {"model":"parrot","prompt":[72,105],"stream_id":1}"#)
        .await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(
        told(&items),
        ([ids("Hi"), vec![257]].concat(), "stop".into())
    );
    for (index, item) in items.iter().enumerate() {
        let top = item["top_logprobs"].as_object().unwrap();
        let shown = item["token"].to_string();
        assert_eq!(top.keys().next(), Some(&shown));
        assert_eq!(item["finish_reason"].is_null(), index < 2);
        assert!(item["logprob"].as_f64().unwrap() <= 0.0);
    }
    assert_eq!(items[0]["stream_id"], json!(1));
}
