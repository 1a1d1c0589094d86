//! A language model behind functions that a page's worker calls. The module imports nothing: neither files nor the network.
//!
//! Numbers go through arguments. Bytes go through memory: `room` adds an argument to the next call and says where to write
//! it; `said_at` and `said_length` say where the last call left its text. A call answers 1 (there is text), 0 (the end) or
//! -1 (the text is what went wrong).

use std::cell::{Cell, RefCell};

use anyhow::{Context, Result};
use generate::{Answer, LanguageModel};

thread_local! {
    static ARGUMENTS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(vec![]) };
    static SAID: RefCell<String> = const { RefCell::new(String::new()) };
    /// One model for a module's whole life: memory of WebAssembly never shrinks, another model gets another worker.
    static MODEL: Cell<Option<&'static LanguageModel>> = const { Cell::new(None) };
    static ANSWER: RefCell<Option<Answer<'static>>> = const { RefCell::new(None) };
}

/// Must be called first, once.
#[no_mangle]
pub extern "C" fn start() {
    extern "C" {
        fn __wasm_call_ctors();
    }
    // The engine's transforms announce themselves in constructors, which nobody else runs here.
    unsafe { __wasm_call_ctors() };
    // A panic ends in a trap, which has no message.
    std::panic::set_hook(Box::new(|panic| SAID.set(panic.to_string())));
}

/// Room for the next argument of so many bytes.
#[no_mangle]
pub extern "C" fn room(bytes: usize) -> *mut u8 {
    ARGUMENTS.with_borrow_mut(|arguments| {
        let mut argument = vec![0; bytes];
        let place = argument.as_mut_ptr();
        arguments.push(argument);
        place
    })
}

#[no_mangle]
pub extern "C" fn said_at() -> *const u8 {
    SAID.with_borrow(|said| said.as_ptr())
}

#[no_mangle]
pub extern "C" fn said_length() -> usize {
    SAID.with_borrow(|said| said.len())
}

/// Arguments: the contents of export.json, generation_config.json (or config.json), tokenizer.json and the archive.
#[no_mangle]
pub extern "C" fn load() -> i32 {
    told(|| {
        let [manifest, settings, tokenizer, archive] = arguments()?;
        let model = LanguageModel::from_bytes(&manifest, &settings, &tokenizer, &archive)?;
        MODEL.set(Some(Box::leak(Box::new(model))));
        Ok(Some(String::new()))
    })
}

/// Reads a prompt (the one argument), forgets what was before it; the text is the prompt's number of tokens.
#[no_mangle]
pub extern "C" fn ask(most_tokens: usize) -> i32 {
    told(|| {
        let [prompt] = arguments()?;
        ANSWER.set(None);
        let answer = MODEL.get().context("no model is loaded")?.answer(std::str::from_utf8(&prompt)?, most_tokens)?;
        let count = answer.prompt.to_string();
        ANSWER.set(Some(answer));
        Ok(Some(count))
    })
}

/// Makes the next token; the text is what it completes.
#[no_mangle]
pub extern "C" fn next() -> i32 {
    told(|| ANSWER.with_borrow_mut(|answer| answer.as_mut().context("nothing was asked")?.next().transpose()))
}

fn arguments<const COUNT: usize>() -> Result<[Vec<u8>; COUNT]> {
    let given = ARGUMENTS.take();
    given.try_into().map_err(|given: Vec<_>| anyhow::anyhow!("{} arguments, not {COUNT}", given.len()))
}

fn told(call: impl FnOnce() -> Result<Option<String>>) -> i32 {
    SAID.set(String::new());
    let (code, text) = match call() {
        Ok(Some(text)) => (1, text),
        Ok(None) => (0, String::new()),
        Err(error) => (-1, format!("{error:#}")),
    };
    SAID.set(text);
    code
}

/// What seeds the hash tables; they hold the model's own names, there is nobody to defend them from.
#[no_mangle]
unsafe extern "Rust" fn __getrandom_v03_custom(place: *mut u8, length: usize) -> Result<(), getrandom::Error> {
    for index in 0..length {
        unsafe { place.add(index).write(index as u8) };
    }
    Ok(())
}
