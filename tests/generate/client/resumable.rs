//! A stream whose connection is cut.

use sapwood_kernel::{Chunk, Port};
use sapwood_tests::proxy::Proxy;

use super::*;

/// `count` words, one for each step.
fn words(count: usize) -> Vec<ScriptStep> {
    let words = (0..count).flat_map(|word| {
        [
            ScriptStep::Text(format!("w{word} ")),
            ScriptStep::SleepMs(1),
        ]
    });
    words.collect()
}

/// TR-1303 at the client: each word is received once, however often the connection is cut.
#[tokio::test]
async fn tr_1303_streams_of_another_server_survive_lost_connections() {
    let server = playing(words(60)).await;
    let proxy = Proxy::to(server.address).await;
    let address = ServerAddress::new(format!("triton+http://{}/m", proxy.address));
    let client = TritonClient::connect(&address).await.unwrap();
    let here = Kernel::new();
    here.add_all(import(&client).await.unwrap()).unwrap();
    let expect: String = (0..60).map(|word| format!("w{word} ")).collect();
    for every in [0, 20, 7] {
        let mut run = here.run::<Chunk>("m", args! { prompt: "x" });
        let (mut reply, mut chunks) = (String::new(), 0);
        while let Some(chunk) = run.next().await {
            let chunk = chunk.unwrap();
            if chunk.port == Port::MAIN {
                reply.push_str(&String::from_utf8_lossy(&chunk.data));
            }
            chunks += 1;
            if every > 0 && chunks % every == 0 {
                proxy.cut();
            }
        }
        assert_eq!(reply, expect, "cut every {every}");
    }
    // The last stream was not read to its end: it must not be retained either.
    let mut run = here.run::<Chunk>("m", args! { prompt: "x" });
    run.next().await.unwrap().unwrap();
    drop(proxy);
    let error = loop {
        match run.next().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => return,
        }
    };
    assert_eq!(error.code(), Code::Truncated, "{error}");
}
